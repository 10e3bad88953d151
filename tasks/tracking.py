"""MLflow: one parent run a retraining, one child run a stage."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from prefect import runtime

from speculators.config import RetrainConfig
from speculators.errors import ConfigError
from speculators.manifest import Manifest, StagePlan
from speculators.store import Store

logger = logging.getLogger(__name__)
_MAX_PARAM_LENGTH = 500


@dataclass
class Tracker:
    """The MLflow run of one retraining.

    Attributes:
        client: Talks to the tracking server.
        uri: Tracking URI, credentials left out.
        experiment_id: Experiment of all runs.
        run_id: The parent run.
        children: Run id of each stage's child run, by stage name.
    """

    client: mlflow.MlflowClient
    uri: str
    experiment_id: str
    run_id: str
    children: dict[str, str] = field(default_factory=dict)

    def log_parameters(self, run_id: str, values: dict[str, Any]) -> None:
        """Log nested values as dotted MLflow parameters."""
        params = [Param(k, str(v)[:_MAX_PARAM_LENGTH]) for k, v in _flatten(values).items()]
        for start in range(0, len(params), 100):
            self.client.log_batch(run_id, params=params[start : start + 100])

    def log_metrics(self, run_id: str, values: dict[str, Any], step: int = 0) -> None:
        """Log every number among the values; lists become ``name_0``, ``name_1``, ..."""
        now = int(time.time() * 1000)
        metrics = []
        for name, value in _flatten(values).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                metrics.append(Metric(name, float(value), now, step))
        if metrics:
            self.client.log_batch(run_id, metrics=metrics)


def open_tracker(config: RetrainConfig) -> Tracker:
    """Connect to MLflow, create the experiment where needed, and start the parent run.

    Raises:
        ConfigError: The tracking server cannot be reached.
    """
    uri = config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None
    if not uri:
        work = Path(config.work_dir).resolve()
        work.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"sqlite:///{work / 'mlflow.db'}", (work / "mlartifacts").as_uri()
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        experiment = client.get_experiment_by_name(config.tracking.experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(config.tracking.experiment, artifact_location=artifacts)
        )
        tags = {"mlflow.source.name": "retrain", "prefect.flow_run_id": runtime.flow_run.id or ""}
        if url := runtime.flow_run.ui_url:
            tags["prefect.flow_run_url"] = url
        run = client.create_run(experiment_id, run_name=runtime.flow_run.name, tags=tags)
    except (MlflowException, OSError) as error:
        raise ConfigError(
            f"MLflow at {_without_credentials(uri)} cannot be used: {error}. Start it, or correct tracking.mlflow_uri"
            " or MLFLOW_TRACKING_URI."
        ) from error
    tracker = Tracker(client, _without_credentials(uri), experiment_id, run.info.run_id)
    tracker.log_parameters(run.info.run_id, config.model_dump(mode="json"))
    return tracker


@dataclass
class StageRun:
    """The child run of one stage, open while the stage runs."""

    tracker: Tracker
    run_id: str
    skipped: bool

    def log_step(self, record: dict[str, Any]) -> None:
        """Log one record of a running training; its ``step`` is the metrics' step."""
        values = {name: value for name, value in record.items() if name != "step"}
        self.tracker.log_metrics(self.run_id, values, step=int(record.get("step", 0)))

    def log_file(self, local: Path, folder: str | None = None) -> None:
        """Keep a local file or folder as an artifact."""
        if local.is_dir():
            self.tracker.client.log_artifacts(self.run_id, str(local), folder)
        else:
            self.tracker.client.log_artifact(self.run_id, str(local), folder)


@contextmanager
def stage_run(tracker: Tracker, plan: StagePlan, store: Store) -> Iterator[tuple[StageRun, Callable[[Manifest], None]]]:
    """A child run around a stage: parameters at its start, manifest and figures at its end, its status as it went.

    Yields:
        The open run, and a function to call with the stage's manifest.
    """
    name = plan.stage.value
    skipped = plan.finished(store) is not None
    run = tracker.client.create_run(
        tracker.experiment_id,
        run_name=name,
        tags={
            "mlflow.parentRunId": tracker.run_id,
            "stage": name,
            "fingerprint": plan.fingerprint,
            "skipped": str(skipped).lower(),
            "store": store.url_of(plan.directory),
        },
    )
    run_id = run.info.run_id
    tracker.children[name] = run_id
    tracker.log_parameters(run_id, plan.determinants)

    def record(manifest: Manifest) -> None:
        tracker.log_metrics(run_id, {**manifest.figures, "seconds": manifest.seconds})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "manifest.json"
            path.write_text(manifest.model_dump_json(indent=2), encoding="utf-8")
            tracker.client.log_artifact(run_id, str(path))

    try:
        yield StageRun(tracker, run_id, skipped), record
    except BaseException as error:
        _end(tracker, run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    _end(tracker, run_id, "FINISHED")


@contextmanager
def parent_run(config: RetrainConfig) -> Iterator[Tracker]:
    """The parent run around a whole retraining, ended with the status that it had."""
    tracker = open_tracker(config)
    try:
        yield tracker
    except BaseException as error:
        _end(tracker, tracker.run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    _end(tracker, tracker.run_id, "FINISHED")


def _end(tracker: Tracker, run_id: str, status: str) -> None:
    try:
        tracker.client.set_terminated(run_id, status)
    except (MlflowException, OSError) as error:
        logger.warning("MLflow run %s could not be marked %s: %s", run_id, status, error)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{key}."))
        elif isinstance(value, list) and value and all(isinstance(v, float) for v in value):
            flat.update({f"{key}_{i}": v for i, v in enumerate(value)})
        else:
            flat[key] = value
    return flat


def _without_credentials(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
