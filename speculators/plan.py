"""What a configuration means before anything runs: every stage's fingerprint and place in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.checkpoints.speculators_format import WEIGHTS_FILE
from speculators.config import RetrainConfig
from speculators.data.prompts import prompts_digest
from speculators.errors import ConfigError
from speculators.hidden_states.format import FORMAT_VERSION, StateFormat
from speculators.manifest import Stage, StagePlan, file_sha256
from speculators.verifier import Verifier


@dataclass(frozen=True)
class RetrainPlan:
    """The stages of one retraining, each determined by its inputs' fingerprints and its own parameters."""

    regenerate: StagePlan
    prepare: StagePlan
    extract: StagePlan
    train: StagePlan
    export: StagePlan
    evaluate: StagePlan


def plan_retraining(config: RetrainConfig, verifier: Verifier) -> RetrainPlan:
    """Derive all stages' fingerprints from the configuration, the verifier and the prompts' content.

    Parameters that change only how fast a stage runs (concurrency, retries, processes' time-outs) do not count.

    Raises:
        DataError: The prompts cannot be read.
        ConfigError: ``train.init_from`` is no drafter.
    """
    regenerate = StagePlan(
        Stage.REGENERATE,
        {
            "verifier": verifier.fingerprint,
            "prompts": prompts_digest(config.regenerate.prompts),
            "parameters": _section(
                config.regenerate, exclude={"prompts", "concurrency", "request_timeout_s", "max_retries"}
            ),
            "dtype": config.serving.dtype,
            "max_model_len": config.serving.max_model_len,
        },
    )
    prepare = StagePlan(Stage.PREPARE, {"regenerate": regenerate.fingerprint, "parameters": _section(config.prepare)})
    extract = StagePlan(
        Stage.EXTRACT,
        {
            "verifier": verifier.fingerprint,
            "prepare": prepare.fingerprint,
            "states_format": FORMAT_VERSION,
            "states": state_format(config, verifier).to_json(),
            "serving_dtype": config.serving.dtype,
            "shard_mib": config.extract.shard_mib,
            # Where vLLM's states are wrong, transformers' must not be mixed with them.
            "backend": config.extract.backend,
        },
    )
    train = StagePlan(
        Stage.TRAIN,
        {
            "extract": extract.fingerprint,
            "parameters": _section(
                config.train, exclude={"device", "checkpoint_every_steps", "init_from", "cache_gib"}
            ),
            "init_from": _drafter_digest(config.train.init_from),
            "num_speculative_tokens": config.evaluate.num_speculative_tokens,
        },
    )
    export = StagePlan(Stage.EXPORT, {"train": train.fingerprint})
    return RetrainPlan(
        regenerate, prepare, extract, train, export, plan_evaluation(config, prepare, export.fingerprint, verifier)
    )


def _drafter_digest(folder: str | None) -> str | None:
    """Hash of a drafter's weights, which say more than the folder's name."""
    if folder is None:
        return None
    weights = Path(folder) / WEIGHTS_FILE
    if not weights.is_file():
        raise ConfigError(f"train.init_from: {folder} is not a drafter's folder: it has no {WEIGHTS_FILE}.")
    return file_sha256(weights)


def plan_evaluation(config: RetrainConfig, prepare: StagePlan, drafter: str, verifier: Verifier) -> StagePlan:
    """The evaluation of any drafter (by fingerprint) on the held-out prompts of a prepared dataset."""
    return StagePlan(
        Stage.EVALUATE,
        {
            "drafter": drafter,
            "verifier": verifier.fingerprint,
            "prepare": prepare.fingerprint,
            "parameters": _section(config.evaluate),
            "dtype": config.serving.dtype,
            "max_num_seqs": config.serving.max_num_seqs,
        },
    )


def auxiliary_layer_ids(config: RetrainConfig, verifier: Verifier) -> list[int]:
    """Layers that feed the drafter: the configured ones, or ``[2, L//2, L-3]`` for L decoder layers; rising, each once.
    An MTP head has none: it reads the last layer.

    vLLM hands a drafter the states in this order whatever its configuration says (``_set_aux_hidden_state_layers`` in
    vllm/model_executor/models/interfaces.py), so it has to be trained on them in this order.
    """
    if config.train.method == "mtp":
        return []
    layers = verifier.num_layers
    return sorted(set(config.extract.aux_layer_ids or (min(2, layers), layers // 2, max(layers - 3, 1))))


def state_format(config: RetrainConfig, verifier: Verifier) -> StateFormat:
    """What to extract: the auxiliary layers, then the last one (whose states give the verifier's own logits)."""
    section = config.extract
    layers = (*auxiliary_layer_ids(config, verifier), verifier.num_layers)
    return StateFormat(layers, section.dtype, section.last_dtype or section.dtype, section.compression)


def _section(section: Any, exclude: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    return section.model_dump(mode="json", exclude=set(exclude))
