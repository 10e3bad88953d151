"""The stages of one retraining as plain functions: what the command runs, and what the Prefect tasks wrap.

Every function returns the stage's manifest. A stage that has finished before, with the same fingerprint, returns its
manifest at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.checkpoints.export import export
from speculators.checkpoints.servable import Servable, servable
from speculators.checkpoints.speculators_format import read_config, validate_drafter
from speculators.checkpoints.stitch import head_names
from speculators.config import RetrainConfig
from speculators.data.prepare import prepare
from speculators.data.prompts import load_prompts
from speculators.data.regenerate import regenerate
from speculators.data.splits import split_prompts
from speculators.errors import ConfigError, ServingError
from speculators.evaluation.evaluate import evaluate
from speculators.hidden_states.capture import Capture
from speculators.hidden_states.extract import extract
from speculators.hidden_states.retention import lease, retired
from speculators.manifest import Manifest, Stage, StagePlan
from speculators.models.drafter import DraftSetting
from speculators.models.methods import METHODS
from speculators.plan import RetrainPlan, auxiliary_layer_ids, plan_evaluation, plan_retraining
from speculators.progress import Progress
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store
from speculators.training.launch import train
from speculators.verifier import Verifier, resolve_verifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retraining:
    """One retraining, ready to run: its configuration, verifier, store and the plan that follows from them."""

    config: RetrainConfig
    verifier: Verifier
    store: Store
    plan: RetrainPlan

    @property
    def work_dir(self) -> Path:
        """Local folder for caches and logs."""
        return Path(self.config.work_dir)


def open_retraining(config: RetrainConfig) -> Retraining:
    """Resolve the verifier, check the store and derive the plan. Whatever is wrong is found here, before any work.

    Raises:
        PipelineError: The verifier, the store, the prompts or a combination of fields cannot work; says what to do.
    """
    store = Store(config.store, cache_dir=Path(config.work_dir) / "cache")
    store.check_writable()
    verifier = resolve_verifier(config)
    _check_fits(config, verifier)
    return Retraining(config, verifier, store, plan_retraining(config, verifier))


def _check_fits(config: RetrainConfig, verifier: Verifier) -> None:
    """Refuse what vLLM would refuse later."""
    if config.train.method == "mtp":
        head_names(verifier.path)
        if config.extract.aux_layer_ids:
            raise ConfigError("extract.aux_layer_ids: an MTP head reads the last layer only. Leave it empty.")
    layers = verifier.num_layers
    for layer in auxiliary_layer_ids(config, verifier):
        if not 0 <= layer < layers:
            raise ConfigError(
                f"extract.aux_layer_ids: layer {layer} does not exist; {verifier.source} has {layers} decoder layers,"
                f" so ids go from 0 (embedding) to {layers - 1}."
            )
    _check_drafter(config, verifier)
    _check_online(config)
    longest = verifier.config.get("max_position_embeddings")
    if longest and config.serving.max_model_len > longest:
        raise ConfigError(
            f"serving.max_model_len ({config.serving.max_model_len}) is more than {verifier.source} can: {longest}."
        )


def _check_online(config: RetrainConfig) -> None:
    """Refuse what could not work in the modes that make hidden states while training goes on."""
    if config.extract.mode == "offline":
        return
    if config.serving.device == config.train.device == "cuda" and not config.extract.endpoints:
        raise ConfigError(
            f"extract.mode {config.extract.mode}: vLLM and training cannot share GPUs. Start vLLM with `speculators"
            " serve-hidden-states` on GPUs of its own, and name its URL in extract.endpoints."
        )


def _check_drafter(config: RetrainConfig, verifier: Verifier) -> None:
    """Refuse a drafter that could not be built, trained or served."""
    name, wanted, whole = config.train.method, config.prepare.draft_vocab_size, verifier.vocab_size
    method = METHODS[name]
    if wanted is not None and wanted > whole:
        raise ConfigError(f"prepare.draft_vocab_size ({wanted}) exceeds the verifier's vocabulary ({whole}).")
    if wanted not in (None, whole) and method.drafter.full_vocabulary:
        raise ConfigError(
            f"prepare.draft_vocab_size ({wanted}): vLLM serves {name} with the verifier's whole vocabulary only. Leave"
            f" it empty, or set it to {whole}."
        )
    if (start := config.train.init_from) is not None:
        other = read_config(Path(start))["speculators_model_type"]
        if other != name and (other, name) not in (("dflash", "dspark"), ("dflash", "dflash2")):
            raise ConfigError(
                f"train.init_from: {start} is a drafter of {other}; {name} can start from one of its own kind"
                f"{' or of dflash' if name in ('dspark', 'dflash2') else ''}."
            )
        validate_drafter(Path(start), verifier)
    layers, tokens = auxiliary_layer_ids(config, verifier), config.evaluate.num_speculative_tokens
    method.config.for_verifier(verifier, DraftSetting(config.train, layers, wanted or whole, tokens, mask_token_id=0))


def run_regenerate(run: Retraining, progress: Progress) -> Manifest:
    """Answer all prompts by the verifier, in a vLLM server started here unless endpoints are configured.

    A server started here saves the hidden states of the answers as it generates them (``extract.one_pass``).
    """
    if (done := run.plan.regenerate.finished(run.store)) is not None:
        return done
    config, serving = run.config, run.config.serving
    arguments = (config, run.plan.regenerate, run.store, run.verifier)
    if serving.endpoints:
        return regenerate(*arguments, serving.endpoints, progress)
    section = config.extract
    one_pass = section.one_pass and section.mode == "offline" and section.backend == "vllm"
    if not one_pass or run.plan.extract.finished(run.store) is not None:
        with VllmServer(serving, run.verifier.path, run.work_dir, name="vllm-regenerate") as server:
            return regenerate(*arguments, [server.url], progress)

    prompts = load_prompts(config.regenerate.prompts, config.regenerate.max_prompts)
    splits = split_prompts({prompt.prompt_id: prompt.turns[0] for prompt in prompts}, config)
    capture = Capture(config, run.plan.extract, run.store, run.verifier)
    asked: set[str] = set()

    def request_fields(prompt_id: str, sample_id: str) -> dict[str, Any]:
        if splits[prompt_id] == "held_out":
            return {}
        asked.add(sample_id)
        return {"kv_transfer_params": capture.request(sample_id)}

    with lease(run.store, run.plan.extract), capture.server("vllm-regenerate") as server:
        capture.forget_errors()
        try:
            manifest = regenerate(*arguments, [server.url], progress, request_fields)
        except ServingError as error:
            raise capture.cause(server, error) from error
        capture.wait_for(asked)
    return manifest


def run_prepare(run: Retraining) -> Manifest:
    """Token ids, loss masks, splits by prompt and the draft vocabulary."""
    return prepare(run.config, run.plan.prepare, run.plan.regenerate, run.store, run.verifier)


def run_extract(run: Retraining, progress: Progress) -> Manifest:
    """Hidden states of all training and validation samples, written to the store by vLLM.

    Not for ``extract.mode`` online and hybrid, in which training asks for them. A set that was deleted after a drafter
    had been trained on it is not made again.
    """
    if (done := _extracted(run)) is not None:
        return done
    with lease(run.store, run.plan.extract):
        return extract(run.config, run.plan.extract, run.plan.prepare, run.store, run.verifier, progress)


def _extracted(run: Retraining) -> Manifest | None:
    """The extraction's manifest if nothing is to be extracted."""
    if run.plan.train.finished(run.store) is not None and (was_there := retired(run.store, run.plan.extract)):
        return was_there
    return run.plan.extract.finished(run.store)


def finished_stages(run: Retraining) -> set[Stage]:
    """The stages that there is nothing to do for."""
    done = {plan.stage for plan in stage_plans(run) if plan.finished(run.store) is not None}
    return done if _extracted(run) is None else done | {Stage.EXTRACT}


def run_train(run: Retraining, progress: Progress, on_metrics: Callable[[dict[str, Any]], None]) -> Manifest:
    """Train the drafter under torchrun; every metrics record goes to ``on_metrics`` while it runs."""
    if (done := run.plan.train.finished(run.store)) is not None:
        return done
    with lease(run.store, run.plan.extract):
        return train(
            run.config,
            run.plan.train,
            run.plan.prepare,
            run.plan.extract,
            run.store,
            run.verifier,
            auxiliary_layer_ids(run.config, run.verifier),
            progress,
            on_metrics,
        )


def run_export(run: Retraining) -> Manifest:
    """The best checkpoint, validated, as the folder that vLLM serves."""
    return export(run.config, run.plan.export, run.plan.train, run.store, run.verifier)


def run_evaluate(run: Retraining, progress: Progress) -> Manifest:
    """Acceptance, throughput and losslessness of the new drafter on the held-out prompts."""
    predicted = run.plan.train.require(run.store, "speculators train").figures
    conditional = itertools.takewhile(
        lambda value: value is not None,
        (predicted.get(f"validation_conditional_accuracy_step_{k}") for k in itertools.count()),
    )
    return evaluate(
        run.config,
        run.plan.evaluate,
        run.plan.prepare,
        drafter_folder(run),
        run.store,
        run.verifier,
        progress,
        predicted_acceptance_length=predicted["predicted_acceptance_length"],
        predicted_per_position=list(itertools.accumulate(conditional, operator.mul)),
    )


def run_evaluate_other(run: Retraining, drafter: str, folder: Path, progress: Progress) -> Manifest:
    """Acceptance of another drafter (the champion) on this retraining's held-out prompts.

    Args:
        drafter: The other drafter's fingerprint.
        folder: Its folder, whose config.json names this retraining's verifier.
    """
    full = plan_evaluation(run.config, run.plan.prepare, drafter, run.verifier)
    if (done := full.finished(run.store)) is not None:
        return done
    config = run.config.model_copy(update={"evaluate": run.config.evaluate.model_copy(update={"reference_prompts": 0})})
    plan = plan_evaluation(config, run.plan.prepare, drafter, run.verifier)
    return evaluate(config, plan, run.plan.prepare, folder, run.store, run.verifier, progress)


def drafter_folder(run: Retraining) -> Path:
    """Local folder of the exported drafter."""
    run.plan.export.require(run.store, "speculators export")
    return run.store.local_copy(run.plan.export.directory)


def servable_drafter(run: Retraining) -> Servable:
    """What to give to vLLM so that it serves the exported drafter."""
    return servable(drafter_folder(run), run.verifier, run.work_dir / "cache")


def stage_plans(run: Retraining) -> list[StagePlan]:
    """All stages in the order in which they run."""
    return [getattr(run.plan, field.name) for field in dataclasses.fields(run.plan)]
