"""Promote: a version in the MLflow registry, and the alias that it deserves."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.errors import CheckpointError
from speculators.manifest import Manifest
from tasks.progress import PrefectProgress
from tasks.tracking import Tracker

logger = logging.getLogger(__name__)
CHAMPION, CHALLENGER = "champion", "challenger"
ARTIFACT = "drafter"


@dataclass(frozen=True)
class Promotion:
    """What became of a new drafter.

    Attributes:
        model: Name in the registry.
        version: Its version.
        alias: ``champion`` or ``challenger``.
        champion_acceptance_length: Acceptance length of the champion that it was compared with, on the same prompts;
            None when there was none to compare with.
    """

    model: str
    version: str
    alias: str
    champion_acceptance_length: float | None


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote(run: stages.Retraining, tracker: Tracker, evaluation: Manifest) -> Promotion:
    """Register the drafter and move ``champion`` to it if it beats the current one on the same held-out prompts.

    A drafter that is registered already (same fingerprint) keeps its version. The current champion is evaluated on this
    retraining's prompts unless that evaluation is in the store.
    """
    client = tracker.client
    name = run.config.tracking.registered_model or registered_name(run)
    champion = _version_by_alias(client, name, CHAMPION)
    version = _register(run, tracker, name, evaluation)
    length = float(evaluation.figures["acceptance_length"])
    client.set_model_version_tag(name, version.version, "acceptance_length", f"{length:.4f}")
    client.set_model_version_tag(name, version.version, "evaluation", run.plan.evaluate.fingerprint)

    if champion is None or champion.version == version.version:
        alias, champion_length = CHAMPION, None
    else:
        champion_length = _champion_acceptance_length(run, tracker, champion)
        alias = CHAMPION if length > champion_length else CHALLENGER
    client.set_registered_model_alias(name, alias, version.version)
    if alias == CHAMPION:
        _drop_stale_challenger(client, name, version.version)
    logger.info("%s version %s is %s (acceptance length %.3f)", name, version.version, alias, length)
    client.set_tag(tracker.run_id, "registered_model", f"{name}/{version.version}")
    client.set_tag(tracker.run_id, "alias", alias)
    return Promotion(name, str(version.version), alias, champion_length)


def registered_name(run: stages.Retraining) -> str:
    """Registry name for a verifier and a method: ``<verifier>-<method>``, with characters that MLflow allows."""
    return re.sub(r"[^a-z0-9._-]+", "-", f"{run.verifier.name}-{run.config.train.method}")


def _register(run: stages.Retraining, tracker: Tracker, name: str, evaluation: Manifest) -> ModelVersion:
    client = tracker.client
    drafter = run.plan.export.fingerprint
    try:
        client.create_registered_model(
            name, description=f"Drafters ({run.config.train.method}) for the verifier {run.verifier.source}."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for known in client.search_model_versions(f"name='{name}'"):
        if known.tags.get("drafter_fingerprint") == drafter:
            return known
    export_run = tracker.children["export"]
    source = f"{client.get_run(export_run).info.artifact_uri}/{ARTIFACT}"
    return client.create_model_version(
        name,
        source,
        run_id=export_run,
        tags={
            "drafter_fingerprint": drafter,
            "verifier": run.verifier.source,
            "verifier_fingerprint": run.verifier.fingerprint,
            "verifier_revision": run.verifier.revision or "",
            "method": run.config.train.method,
            "num_speculative_tokens": str(run.config.evaluate.num_speculative_tokens),
            "acceptance_rate": f"{evaluation.figures['acceptance_rate']:.4f}",
            "retraining_run": tracker.run_id,
        },
    )


def _version_by_alias(client: mlflow.MlflowClient, name: str, alias: str) -> ModelVersion | None:
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _drop_stale_challenger(client: mlflow.MlflowClient, name: str, version: str) -> None:
    challenger = _version_by_alias(client, name, CHALLENGER)
    if challenger is not None and str(challenger.version) == str(version):
        client.delete_registered_model_alias(name, CHALLENGER)


def _champion_acceptance_length(run: stages.Retraining, tracker: Tracker, champion: ModelVersion) -> float:
    drafter = champion.tags.get("drafter_fingerprint")
    if not drafter:
        raise CheckpointError(
            f"Version {champion.version} of {champion.name} is champion but has no tag drafter_fingerprint. Remove the"
            " alias, or register drafters only through this pipeline."
        )
    folder = _fetch(run, tracker, champion, drafter)
    with PrefectProgress("evaluate-champion") as progress:
        manifest = stages.run_evaluate_other(run, drafter, folder, progress)
    return float(manifest.figures["acceptance_length"])


def _fetch(run: stages.Retraining, tracker: Tracker, version: ModelVersion, drafter: str) -> Path:
    """The registered drafter's folder, with its config naming this machine's copy of the verifier."""
    target = run.work_dir / "cache" / "champions" / drafter
    if target.is_dir():
        return target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        mlflow.artifacts.download_artifacts(
            artifact_uri=version.source, dst_path=temporary, tracking_uri=tracker.client.tracking_uri
        )
        found = next(Path(temporary).rglob("config.json"), None)
        if found is None:
            raise CheckpointError(f"Version {version.version} of {version.name} holds no drafter (no config.json).")
        config = json.loads(found.read_text(encoding="utf-8"))
        config["speculators_config"]["verifier"]["name_or_path"] = str(run.verifier.path)
        found.write_text(json.dumps(config, indent=2), encoding="utf-8")
        shutil.move(found.parent, target)
    return target.resolve()
