"""Drafters in the "speculators" format: a folder that ``vllm serve FOLDER`` loads by itself.

What vLLM reads: vllm/transformers_utils/configs/speculators/ (config.json) and
vllm/model_executor/models/llama_eagle3.py (tensor names).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from speculators.data.vocabulary import VocabMapping
from speculators.errors import CheckpointError, DataError
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter, rope_parameters
from speculators.models.verifier_head import VerifierHead
from speculators.store import write_atomic
from speculators.verifier import Verifier, read_text_config

FORMAT_VERSION = "0.3.0"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def save_drafter(
    drafter: Eagle3Drafter,
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
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if vocab_mapping is not None:
        if len(vocab_mapping.d2t) != config.draft_vocab_size or len(vocab_mapping.t2d) != config.vocab_size:
            raise CheckpointError(
                f"The vocabulary mapping keeps {len(vocab_mapping.d2t)} of {len(vocab_mapping.t2d)} tokens; the drafter"
                f" has {config.draft_vocab_size} of {config.vocab_size}."
            )
        tensors |= {"d2t": vocab_mapping.d2t.contiguous(), "t2d": vocab_mapping.t2d.contiguous()}
    write_atomic(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    described = _describe(config, verifier, num_speculative_tokens, drafter.lm_head.weight.dtype)
    write_atomic(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())


def _describe(
    config: Eagle3Config, verifier: Verifier, num_speculative_tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    dtype_name = str(dtype).removeprefix("torch.")
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": config.rope_parameters,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": verifier.config.get("bos_token_id"),
        "eos_token_id": verifier.config.get("eos_token_id"),
        "dtype": dtype_name,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "dtype": dtype_name,
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "speculators_config": {
            "algorithm": "eagle3",
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


def verifier_name(verifier: Verifier) -> str:
    """What vLLM is to load as verifier: the hub id where it has one, else the local folder."""
    is_hub_id = "/" in verifier.source and not Path(verifier.source).exists()
    return verifier.source if is_hub_id else str(verifier.path)


def read_config(folder: Path) -> dict[str, Any]:
    """A drafter's config.json.

    Raises:
        CheckpointError: It is missing, not JSON, or not of an EAGLE-3 drafter in this format.
    """
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a drafter: cannot read {CONFIG_FILE} ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise CheckpointError(f"{file}: speculators_model_type is {kind!r}; 'eagle3' is what can be loaded here.")
    return config


def load_drafter(
    folder: Path, verifier_path: Path | None = None
) -> tuple[Eagle3Drafter, VocabMapping | None, dict[str, Any]]:
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
    shape = _shape(config, folder / CONFIG_FILE)
    tensors = _read_tensors(folder)
    mapping = _take_mapping(tensors, folder)
    with torch.device("meta"):
        drafter = Eagle3Drafter(shape)
    _check_tensors(tensors, drafter, mapping, folder)
    drafter = Eagle3Drafter(shape).to(tensors["lm_head.weight"].dtype)
    drafter.load_state_dict(tensors)
    source = verifier_path or Path(config["speculators_config"]["verifier"]["name_or_path"])
    if not source.is_dir():
        raise CheckpointError(f"{folder / CONFIG_FILE}: the verifier {str(source)!r} is not a folder on this machine.")
    head = VerifierHead.read(source, read_text_config(source), None, drafter.lm_head.weight.dtype)
    drafter.embed_tokens = head.embed_tokens
    return drafter, mapping, config


def validate_drafter(folder: Path, verifier: Verifier) -> None:
    """Refuse what vLLM would refuse, or load and then accept nothing of.

    Raises:
        CheckpointError: Names the first tensor or key that does not fit, and what would.
    """
    config = read_config(folder)
    where = folder / CONFIG_FILE
    shape = _shape(config, where)
    if shape.target_hidden_size != verifier.hidden_size:
        raise CheckpointError(
            f"{where}: target_hidden_size is {shape.target_hidden_size}; the verifier's is {verifier.hidden_size}."
        )
    if shape.vocab_size != verifier.vocab_size:
        raise CheckpointError(f"{where}: vocab_size is {shape.vocab_size}; the verifier's is {verifier.vocab_size}.")
    for layer in shape.aux_layer_ids:
        if not 0 <= layer < verifier.num_layers:
            raise CheckpointError(
                f"{where}: eagle_aux_hidden_state_layer_ids has {layer}; the verifier has {verifier.num_layers} layers."
            )
    tensors = _read_tensors(folder)
    mapping = _take_mapping(tensors, folder)
    with torch.device("meta"):
        drafter = Eagle3Drafter(shape)
    _check_tensors(tensors, drafter, mapping, folder)
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{folder / WEIGHTS_FILE}: tensor {name} has values that are not finite.")


def _shape(config: dict[str, Any], where: Path) -> Eagle3Config:
    try:
        layer = config["transformer_layer_config"]
        if config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] < 1:
            raise CheckpointError(f"{where}: speculative_tokens must be at least 1.")
        return Eagle3Config(
            hidden_size=layer["hidden_size"],
            intermediate_size=layer["intermediate_size"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            num_layers=layer["num_hidden_layers"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            rms_norm_eps=layer["rms_norm_eps"],
            rope_parameters=rope_parameters(layer),
            max_position_embeddings=layer["max_position_embeddings"],
            target_hidden_size=config["target_hidden_size"],
            aux_layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            norm_before_residual=config["norm_before_residual"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{where} lacks a key: {error}.") from error


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


def _check_tensors(
    tensors: dict[str, Tensor], drafter: Eagle3Drafter, mapping: VocabMapping | None, folder: Path
) -> None:
    where, config = folder / WEIGHTS_FILE, drafter.config
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    for name, size in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{where} has no tensor {name}.")
        if tuple(tensors[name].shape) != size:
            raise CheckpointError(f"{where}: {name} is {list(tensors[name].shape)}; config.json asks for {list(size)}.")
    if unexpected := sorted(set(tensors) - set(expected)):
        raise CheckpointError(f"{where}: tensor {unexpected[0]} is unknown to an EAGLE-3 drafter.")
    reduced = config.draft_vocab_size != config.vocab_size
    if reduced and mapping is None:
        raise CheckpointError(f"{where}: the draft vocabulary is reduced, but t2d and d2t are missing.")
    if mapping is not None and (len(mapping.d2t), len(mapping.t2d)) != (config.draft_vocab_size, config.vocab_size):
        raise CheckpointError(
            f"{where}: the mapping keeps {len(mapping.d2t)} of {len(mapping.t2d)} tokens; config.json says"
            f" {config.draft_vocab_size} of {config.vocab_size}."
        )
