"""Drafters in the "speculators" format: a folder that ``vllm serve FOLDER`` loads by itself.

What vLLM reads: vllm/transformers_utils/configs/speculators/ (config.json), and the loaders in
vllm/model_executor/models/ (tensor names), such as llama_eagle3.py and qwen3_dflash.py.

A fine-tuned MTP head is the exception: vLLM loads it from the verifier's checkpoint only. Its folder here holds the
head's tensors under the verifier's names, to be stitched into a copy of the verifier (servable.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from speculators.data.vocabulary import VocabMapping
from speculators.errors import CheckpointError, DataError
from speculators.models.drafter import Drafter, DrafterConfig
from speculators.models.layers import RotaryEmbedding, rope_parameters
from speculators.models.methods import METHODS
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.verifier_head import VerifierHead
from speculators.store import write_atomic
from speculators.verifier import Verifier, read_text_config

FORMAT_VERSION = "0.3.0"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

T = TypeVar("T")
_LAYER_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def save_drafter(
    drafter: Drafter,
    folder: Path,
    verifier: Verifier,
    num_speculative_tokens: int,
    vocab_mapping: VocabMapping | None,
) -> None:
    """Write a drafter as vLLM loads it: model.safetensors first, config.json last, each atomically.

    Args:
        drafter: What to write; the frozen embedding is left out, because vLLM shares the verifier's.
        folder: Made where it does not exist.
        verifier: Named in the config, so that the folder alone can be served.
        num_speculative_tokens: Draft length that vLLM uses by default.
        vocab_mapping: Present exactly when the draft vocabulary is reduced.

    Raises:
        CheckpointError: The mapping does not fit the drafter.
    """
    config = drafter.config
    if (vocab_mapping is None) != (config.draft_vocab_size == config.vocab_size):
        raise CheckpointError("A drafter needs a vocabulary mapping exactly when its vocabulary is reduced.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.stored_tensors().items()}
    if vocab_mapping is not None:
        if len(vocab_mapping.d2t) != config.draft_vocab_size or len(vocab_mapping.t2d) != config.vocab_size:
            raise CheckpointError(
                f"The vocabulary mapping keeps {len(vocab_mapping.d2t)} of {len(vocab_mapping.t2d)} tokens; the drafter"
                f" has {config.draft_vocab_size} of {config.vocab_size}."
            )
        tensors |= {"d2t": vocab_mapping.d2t.contiguous(), "t2d": vocab_mapping.t2d.contiguous()}
    write_atomic(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    described = _describe(drafter, verifier, num_speculative_tokens)
    write_atomic(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())


def _describe(drafter: Drafter, verifier: Verifier, num_speculative_tokens: int) -> dict[str, Any]:
    config = drafter.config
    name, method = next((name, method) for name, method in METHODS.items() if method.config is type(config))
    dtype_name = str(drafter.lm_head.weight.dtype).removeprefix("torch.")
    described: dict[str, Any] = {
        "architectures": [method.architecture],
        "model_type": "speculators",
        "speculators_model_type": name,
        "speculators_version": FORMAT_VERSION,
        "dtype": dtype_name,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier_name(verifier), "architectures": verifier.architectures},
        },
    }
    if isinstance(config, MtpConfig):  # the verifier's own config.json says the rest
        return described
    layer = {
        "model_type": config.layer_type,
        "architectures": [_LAYER_ARCHITECTURES[config.layer_type]],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **_describe_rope(config.rope_parameters),
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": verifier.config.get("bos_token_id"),
        "eos_token_id": verifier.config.get("eos_token_id"),
        "dtype": dtype_name,
        **config.layer_keys(),
    }
    return {
        **described,
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        config.aux_key: list(config.aux_layer_ids),
        **config.own_keys(),
    }


def _describe_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 reads it (``rope_parameters``), and as older readers do (the other two keys)."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    legacy: dict[str, Any] = {"rope_theta": parameters["rope_theta"]}
    if parameters["rope_type"] != "default":
        legacy["rope_scaling"] = scaling
    return {"rope_parameters": parameters, **legacy}


def verifier_name(verifier: Verifier) -> str:
    """What vLLM is to load as verifier: the hub id where it has one, else the local folder."""
    is_hub_id = "/" in verifier.source and not Path(verifier.source).exists()
    return verifier.source if is_hub_id else str(verifier.path)


def read_config(folder: Path) -> dict[str, Any]:
    """A drafter's config.json.

    Raises:
        CheckpointError: It is missing, not JSON, or not of a known method in this format.
    """
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a drafter: cannot read {CONFIG_FILE} ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(config).__name__}.")
    kind = config.get("speculators_model_type")
    if kind not in METHODS:
        raise CheckpointError(
            f"{file}: speculators_model_type is {kind!r}; {', '.join(METHODS)} are what can be loaded here."
        )
    return config


def load_drafter(
    folder: Path, verifier_path: Path | None = None
) -> tuple[Drafter, VocabMapping | None, dict[str, Any]]:
    """Load a drafter, with the verifier's embedding.

    Args:
        folder: The drafter.
        verifier_path: The verifier's folder; None for the one that the drafter's config names.

    Returns:
        The drafter in the checkpoint's dtype, its vocabulary mapping (None when not reduced) and its config.json.

    Raises:
        CheckpointError: A file, key or tensor is missing, unexpected or of a wrong shape; names the first.
    """
    config = read_config(folder)
    tensors, mapping = read_weights(folder)
    source = verifier_path or Path(_check_serving(config, folder / CONFIG_FILE))
    if not source.is_dir():
        raise CheckpointError(f"{folder / CONFIG_FILE}: the verifier {str(source)!r} is not a folder on this machine.")
    if config["speculators_model_type"] == "mtp":
        return _load_mtp(tensors, source), None, config
    shape = _shape(config, folder / CONFIG_FILE)
    make = METHODS[config["speculators_model_type"]].drafter
    with torch.device("meta"):
        drafter = make(shape)
    _check_tensors(tensors, drafter, mapping, folder)
    dtype = next(iter(tensors.values())).dtype
    drafter = make(shape).to(dtype)
    drafter.load_state_dict(tensors, strict=False)  # _check_tensors has seen that nothing else is missing
    head = VerifierHead.read(source, read_text_config(source), None, dtype)
    drafter.embed_tokens = head.embed_tokens
    if drafter.shares_lm_head:
        drafter.lm_head.weight.data = head.lm_head
    return drafter, mapping, config


def validate_drafter(folder: Path, verifier: Verifier) -> None:
    """Refuse what vLLM would refuse, or load and then accept nothing of.

    Raises:
        CheckpointError: Names the first tensor or key that does not fit, and what would.
    """
    config = read_config(folder)
    where = folder / CONFIG_FILE
    tensors, mapping = read_weights(folder)
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{folder / WEIGHTS_FILE}: tensor {name} has values that are not finite.")
    if config["speculators_model_type"] == "mtp":
        _check_serving(config, where)
        _load_mtp(tensors, verifier.path)
        return
    shape = _shape(config, where)
    for key, found, wanted in (
        ("target_hidden_size", shape.target_hidden_size, verifier.hidden_size),
        ("hidden_size", shape.hidden_size, verifier.hidden_size),  # vLLM shares the verifier's embedding
        ("vocab_size", shape.vocab_size, verifier.vocab_size),
    ):
        if found != wanted:
            raise CheckpointError(f"{where}: {key} is {found}; the verifier's is {wanted}.")
    for layer in shape.aux_layer_ids:
        if not 0 <= layer < verifier.num_layers:
            raise CheckpointError(
                f"{where}: {shape.aux_key} has {layer}; the verifier has {verifier.num_layers} layers,"
                f" so ids go from 0 (embedding) to {verifier.num_layers - 1}."
            )
    with torch.device("meta"):
        drafter = METHODS[config["speculators_model_type"]].drafter(shape)
    _check_tensors(tensors, drafter, mapping, folder)


def _load_mtp(tensors: dict[str, Tensor], verifier_path: Path) -> MtpDrafter:
    """The verifier's MTP head with these tensors, in float32."""
    drafter = MtpDrafter(MtpConfig.for_folder(verifier_path))
    drafter.initialise(VerifierHead.read(verifier_path, read_text_config(verifier_path), None))
    drafter.load_head(tensors)
    return drafter


def _check_serving(config: dict[str, Any], where: Path) -> str:
    """Check what every method's config.json says about drafting; the verifier that it names."""
    serving = _Fields(config, where).section("speculators_config")
    proposals = serving.get("proposal_methods", list)
    if not proposals:
        raise CheckpointError(f"{where}: speculators_config.proposal_methods is empty.")
    if _Fields(proposals[0], where).get("speculative_tokens", int) < 1:
        raise CheckpointError(f"{where}: speculative_tokens must be at least 1.")
    return serving.section("verifier").get("name_or_path", str)


def _shape(config: dict[str, Any], where: Path) -> DrafterConfig:
    """The drafter that config.json describes, every value checked that a tensor's shape does not check later."""
    layer, head = _Fields(config, where).section("transformer_layer_config"), _Fields(config, where)
    kind = METHODS[config["speculators_model_type"]].config
    layer.expect("model_type", *_LAYER_ARCHITECTURES)
    layer.expect("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias"):
        if layer.values.get(key):
            raise CheckpointError(f"{where}: transformer_layer_config.{key} is set; drafters here have no biases.")
    _check_serving(config, where)
    aux = head.get(kind.aux_key, list)
    if not aux or not all(type(i) is int for i in aux) or len(set(aux)) != len(aux):
        raise CheckpointError(f"{where}: {kind.aux_key} is {aux}; it must be different layer numbers.")
    try:
        own = kind.read_own_keys(config)
    except KeyError as error:
        raise CheckpointError(f"{where} lacks {error.args[0]}.") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}.") from error
    shape = kind(
        hidden_size=layer.get("hidden_size", int),
        intermediate_size=layer.get("intermediate_size", int),
        num_attention_heads=layer.get("num_attention_heads", int),
        num_key_value_heads=layer.get("num_key_value_heads", int),
        head_dim=layer.get("head_dim", int),
        num_layers=layer.get("num_hidden_layers", int),
        vocab_size=layer.get("vocab_size", int),
        draft_vocab_size=head.get("draft_vocab_size", int),
        rms_norm_eps=layer.get("rms_norm_eps", float),
        rope_parameters=rope_parameters(layer.values),
        max_position_embeddings=layer.get("max_position_embeddings", int),
        target_hidden_size=head.get("target_hidden_size", int),
        aux_layer_ids=tuple(aux),
        layer_type=layer.get("model_type", str),
        **own,
    )
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_layers"):
        if getattr(shape, name) < 1:
            raise CheckpointError(f"{where}: {name} is {getattr(shape, name)}; it must be at least 1.")
    if shape.num_attention_heads % shape.num_key_value_heads or shape.head_dim < 2 or shape.head_dim % 2:
        raise CheckpointError(
            f"{where}: {shape.num_attention_heads} attention heads of head_dim {shape.head_dim} with"
            f" {shape.num_key_value_heads} key-value heads; head_dim must be even and the heads a multiple of the"
            " key-value heads."
        )
    if not 1 <= shape.draft_vocab_size <= shape.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size is {shape.draft_vocab_size}; it must be between 1 and the verifier's"
            f" {shape.vocab_size}."
        )
    name = config["speculators_model_type"]
    if METHODS[name].drafter.full_vocabulary and shape.draft_vocab_size != shape.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size is {shape.draft_vocab_size}; {name} needs the whole vocabulary of"
            f" {shape.vocab_size} tokens."
        )
    try:
        RotaryEmbedding(shape.head_dim, shape.rope_parameters)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}.") from error
    return shape


@dataclass(frozen=True)
class _Fields:
    """Values of a JSON object, read with their types checked."""

    values: Any
    where: Path

    def section(self, key: str) -> _Fields:
        return _Fields(self.get(key, dict), self.where)

    def get(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key) if isinstance(self.values, dict) else None
        if value is None:
            raise CheckpointError(f"{self.where} lacks {key}.")
        accepted: Any = (int, float) if kind is float else kind
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be of type {kind.__name__}.")
        return value

    def expect(self, key: str, *allowed: str) -> None:
        if (found := self.values.get(key)) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{self.where}: {key} is {found!r}; drafters here have {wanted}.")


def read_weights(folder: Path) -> tuple[dict[str, Tensor], VocabMapping | None]:
    """The tensors of a drafter by name, and its vocabulary mapping.

    Raises:
        CheckpointError: The weights are missing or damaged, or the mapping contradicts itself.
    """
    tensors = _read_tensors(folder)
    return tensors, _take_mapping(tensors, folder)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS_FILE
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _take_mapping(tensors: dict[str, Tensor], folder: Path) -> VocabMapping | None:
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and t2d is None:
        return None
    if d2t is None or t2d is None:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: t2d and d2t must be there both or not at all.")
    mapping = VocabMapping(t2d, d2t)
    try:
        mapping.validate()
    except DataError as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: {error}") from error
    return mapping


def _check_tensors(tensors: dict[str, Tensor], drafter: Drafter, mapping: VocabMapping | None, folder: Path) -> None:
    where, config = folder / WEIGHTS_FILE, drafter.config
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.stored_tensors().items()}
    for name, size in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{where} has no tensor {name}.")
        if tuple(tensors[name].shape) != size:
            raise CheckpointError(f"{where}: {name} is {list(tensors[name].shape)}; config.json asks for {list(size)}.")
        if not tensors[name].is_floating_point():
            raise CheckpointError(f"{where}: {name} is {tensors[name].dtype}; it must be a floating-point tensor.")
    if unexpected := sorted(set(tensors) - set(expected)):
        raise CheckpointError(f"{where}: tensor {unexpected[0]} is unknown to a {type(drafter).__name__}.")
    reduced = config.draft_vocab_size != config.vocab_size
    if reduced and mapping is None:
        raise CheckpointError(f"{where}: the draft vocabulary is reduced, but t2d and d2t are missing.")
    if mapping is not None and (len(mapping.d2t), len(mapping.t2d)) != (config.draft_vocab_size, config.vocab_size):
        raise CheckpointError(
            f"{where}: the mapping keeps {len(mapping.d2t)} of {len(mapping.t2d)} tokens; config.json says"
            f" {config.draft_vocab_size} of {config.vocab_size}."
        )
