"""Drafters as research code stores them: EAGLE-3 of SafeAILab and SpecForge, DFlash of z-lab.

This module knows what the keys of their config.json and the names of their tensors mean. vLLM serves such folders too;
how it reads them (vllm/model_executor/models/llama_eagle3.py and qwen3_dflash.py) decides where their authors' code
leaves a question open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from speculators.errors import CheckpointError
from speculators.models.dflash import DFlashConfig
from speculators.models.drafter import DrafterConfig
from speculators.models.eagle3 import Eagle3Config
from speculators.models.layers import RotaryEmbedding, rope_parameters

Layout = Literal["safeailab", "specforge", "z-lab"]
LAYOUTS: dict[Layout, str] = {"safeailab": "eagle3", "specforge": "eagle3", "z-lab": "dflash"}
"""The drafting method of each layout."""

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_FIRST_LAYER = "midlayer."

# Keys whose other values change what a drafter computes, with the one value that drafters here have.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "is_neox_style": True,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}
_DFLASH_FIXED: dict[str, Any] = {
    **_FIXED,
    "attention_mode": "gqa",
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "causal": False,
    "final_logit_softcapping": 0,
    "input_embedding_scale": 1.0,
    "is_causal": False,
    "output_multiplier": 1.0,
    "use_swa": False,
}
_DFLASH_KEYS = {
    "block_size", "mask_token", "mask_token_id", "num_target_layers", "sample_from_anchor", "target_layer_ids",
}  # fmt: skip
_OTHER_METHODS = ("DFlash2", "DSpark", "Domino", "PEagle", "Peagle")
_MTP_NAME = re.compile(r"(^|\.)(mtp|mtp_layers)\.|\.eh_proj\.weight$")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: The file is missing, not JSON, or not an object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"Cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(values).__name__}.")
    return values


def detect_method(config: dict[str, Any], names: Collection[str], folder: Path) -> str:
    """The drafting method of a research checkpoint: ``eagle3`` or ``dflash``.

    Args:
        config: Its config.json.
        names: Its tensors.
        folder: Named in errors.

    Raises:
        CheckpointError: It is of a kind that the speculators format does not hold, or of none that is known; says how
            it can be served, where it can.
    """
    architectures = [str(name) for name in config.get("architectures") or []]
    if kind := config.get("speculators_model_type"):
        raise CheckpointError(f"{folder} is in the speculators format already ({kind}).")
    if mtp := next((name for name in names if _MTP_NAME.search(name)), None):
        raise CheckpointError(
            f"{folder} holds a native MTP head ({mtp}). It is trained in place and served from the verifier's own"
            ' checkpoint: vllm serve VERIFIER --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'.'
        )
    if other := next((name for name in architectures if any(part in name for part in _OTHER_METHODS)), None):
        raise CheckpointError(f"{folder} is a {other}; EAGLE-3 and plain DFlash are what can be converted.")
    if "dflash_config" in config or "hidden_norm.weight" in names or "DFlashDraftModel" in architectures:
        return "dflash"
    is_eagle3 = any("Eagle3" in name for name in architectures) or "draft_vocab_size" in config
    if is_eagle3 or first_layer_prefix(names) == _FIRST_LAYER or "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if "fc.weight" in names:
        bias = " (but not one with fc.bias, as here: vLLM 0.32 has no place for it)" if "fc.bias" in names else ""
        raise CheckpointError(
            f"{folder} looks like EAGLE-1 or HASS: fc.weight without EAGLE-3's hidden_norm. The speculators format does"
            f" not hold these. vLLM serves such a folder directly{bias}: vllm serve VERIFIER --speculative-config"
            f' \'{{"method": "eagle", "model": "{folder}", "num_speculative_tokens": 3}}\'.'
        )
    raise CheckpointError(
        f"{folder} is no drafter that is known here: EAGLE-3 (SafeAILab, SpecForge) has midlayer.* tensors, DFlash"
        " (z-lab) has hidden_norm.weight and a dflash_config."
    )


def first_layer_prefix(names: Collection[str]) -> str:
    """How a checkpoint begins the names of its first layer's tensors: ``midlayer.`` or ``layers.0.``."""
    return _FIRST_LAYER if any(name.startswith(_FIRST_LAYER) for name in names) else "layers.0."


def rename(name: str, old_prefix: str, new_prefix: str) -> str:
    """A tensor's name with the first layer's prefix exchanged; vLLM's loader does the same."""
    return new_prefix + name.removeprefix(old_prefix) if name.startswith(old_prefix) else name


def read_shape(
    method: str, config: dict[str, Any], names: Collection[str], num_layers: int | None, where: Path
) -> tuple[DrafterConfig, list[str]]:
    """The drafter that a research config.json describes.

    Args:
        method: ``eagle3`` or ``dflash``.
        config: The research config.json.
        names: The checkpoint's tensors.
        num_layers: Decoder layers of the verifier; None when not known.
        where: The file, for errors.

    Returns:
        Its shape, and notes on what config.json left open.

    Raises:
        CheckpointError: A key is missing or wrong, or asks for what the speculators format cannot hold.
    """
    if method == "eagle3":
        return _read_eagle3(config, names, num_layers, where)
    return _read_dflash(config, num_layers, where), []


def _read_eagle3(
    config: dict[str, Any], names: Collection[str], num_layers: int | None, where: Path
) -> tuple[Eagle3Config, list[str]]:
    """Without ``norm_before_residual`` in config.json the residual is the features before their norm: so it is in the
    code of SafeAILab, SpecForge and SGLang, and vLLM's default for such a folder (not for the speculators format)."""
    eagle = _section(config, "eagle_config", where)
    _expect_fixed({**config, **eagle}, _FIXED, where)
    ids, notes = _aux_layer_ids(config, eagle, num_layers, where)
    has_head_norms = any(name.endswith(".self_attn.q_norm.weight") for name in names)
    flags: dict[str, Any] = {key: bool(config.get(key)) for key in ("norm_before_residual", "fc_norm", "norm_output")}
    shape = Eagle3Config(
        **_common(config, "qwen3" if has_head_norms else "llama", where),
        aux_layer_ids=tuple(ids),
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
        **flags,
    )
    return shape, notes


def _aux_layer_ids(
    config: dict[str, Any], eagle: dict[str, Any], num_layers: int | None, where: Path
) -> tuple[list[int], list[str]]:
    """The verifier layers that feed an EAGLE-3 drafter, 0 being the embedding's output.

    Three places, in this order:

    - At the top level they count as here; that is vLLM's own key.
    - In ``eagle_config`` there are two ways of counting. SpecForge and ModelOpt count the OUTPUTS of decoder layers (id
      i there is i+1 here), others count as here. SGLang tells them apart by the first id: 1 means outputs (its pull
      request 25454). So do we; vLLM's first runner takes them as they are.
    - Absent: ``[2, L//2, L-3]`` for L decoder layers, which SafeAILab's code has built in. It is vLLM's default
      (``get_eagle3_default_aux_hidden_state_layers`` in vllm/model_executor/models/interfaces.py); SpecForge writes the
      same layers as outputs 1, L//2 - 1 and L - 4.
    """
    if config.get(AUX_KEY) is not None:
        return _layer_ids(config, AUX_KEY, where), []
    if eagle.get(AUX_KEY) is not None:
        stored = _layer_ids(eagle, AUX_KEY, where)
        shift = 1 if stored[0] == 1 else 0
        meaning = "begins with 1, so it counts layer outputs" if shift else "is taken as it is"
        ids = [layer_id + shift for layer_id in stored]
        return ids, [f"eagle_config.{AUX_KEY} {stored} {meaning}: layers {ids}, 0 being the embedding"]
    if num_layers is None:
        raise CheckpointError(f"{where} lacks {AUX_KEY}.")
    ids = default_aux_layer_ids(num_layers)
    return ids, [f"config.json names no auxiliary layers; the default for {num_layers} layers is {ids}"]


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """EAGLE-3's auxiliary layers for a verifier of that many decoder layers; see :func:`_aux_layer_ids`."""
    return [2, num_layers // 2, num_layers - 3]


def _read_dflash(config: dict[str, Any], num_layers: int | None, where: Path) -> DFlashConfig:
    """z-lab's ``target_layer_ids`` count decoder-layer OUTPUTS: id i there is i+1 here, where 0 is the embedding
    (vLLM: ``get_eagle3_aux_layers_from_config`` in vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py)."""
    inner = _section(config, "dflash_config", where)
    if unknown := sorted(set(inner) - _DFLASH_KEYS - set(_DFLASH_FIXED)):
        raise CheckpointError(
            f"{where}: dflash_config.{unknown[0]} is not known here. Remove it if it does not change what the drafter"
            " computes."
        )
    merged = {**config, **inner}
    _expect_fixed(merged, _DFLASH_FIXED, where)
    kinds = config.get("layer_types") or (["sliding_attention"] if config.get("use_sliding_window") else [])
    if any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{where}: layer_types is {kinds}; drafters here have full_attention in all layers.")
    sizes = {size for size in (config.get("block_size"), inner.get("block_size")) if size is not None}
    if len(sizes) > 1:
        raise CheckpointError(f"{where}: block_size is {config['block_size']}, in dflash_config {inner['block_size']}.")
    targets = merged.get("num_target_layers")
    if num_layers is not None and targets not in (None, num_layers):
        raise CheckpointError(f"{where}: num_target_layers is {targets}; the verifier has {num_layers} layers.")
    return DFlashConfig(
        **_common(config, "qwen3", where),
        aux_layer_ids=tuple(layer_id + 1 for layer_id in _layer_ids(merged, "target_layer_ids", where)),
        block_size=_integer(merged, "block_size", where, least=2),
        mask_token_id=_integer(merged, "mask_token_id", where, least=0),
        sample_from_anchor=bool(inner.get("sample_from_anchor", False)),
    )


def _common(config: dict[str, Any], layer_type: str, where: Path) -> dict[str, Any]:
    """What both methods have: the fields of :class:`DrafterConfig` but for ``aux_layer_ids``."""
    hidden, heads = _integer(config, "hidden_size", where), _integer(config, "num_attention_heads", where)
    vocabulary = _integer(config, "vocab_size", where)
    head_dim = _integer(config, "head_dim", where, default=hidden // heads)
    rope = rope_parameters(config)
    try:
        RotaryEmbedding(head_dim, rope)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}.") from error
    return {
        "hidden_size": hidden,
        "intermediate_size": _integer(config, "intermediate_size", where),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(config, "num_key_value_heads", where, default=heads),
        "head_dim": head_dim,
        "num_layers": _integer(config, "num_hidden_layers", where),
        "vocab_size": vocabulary,
        "draft_vocab_size": _integer(config, "draft_vocab_size", where, default=vocabulary),
        "rms_norm_eps": float(config.get("rms_norm_eps") or 1e-6),
        "rope_parameters": rope,
        "max_position_embeddings": _integer(config, "max_position_embeddings", where, default=2048),
        "target_hidden_size": _integer(config, "target_hidden_size", where, default=hidden),
        "layer_type": layer_type,
    }


def describe_eagle3(
    config: dict[str, Any], layout: Layout, num_layers: int | None, where: Path
) -> tuple[dict[str, Any], list[str]]:
    """The config.json that an EAGLE-3 drafter in the speculators format has in SafeAILab's or SpecForge's layout.

    Args:
        config: Its config.json in the speculators format.
        layout: ``safeailab`` or ``specforge``.
        num_layers: Decoder layers of the verifier; None when not known.
        where: The file, for errors.

    Returns:
        The research config.json, and notes on what to look after.

    Raises:
        CheckpointError: The drafter has what that layout's code does not compute.
    """
    layer = _section(config, "transformer_layer_config", where)
    flags = _own_keys(Eagle3Config, config, where)
    beyond = [key for key in ("norm_before_fc", "fc_norm", "norm_output") if flags[key]]
    if flags["norm_before_residual"]:
        raise CheckpointError(
            f"{where}: norm_before_residual is true. SafeAILab's code, SpecForge and SGLang take the features before"
            " their norm as the residual and read no such key, so they would run another drafter than this one."
        )
    if layout == "safeailab" and beyond:
        raise CheckpointError(f"{where}: {beyond[0]} is true; the layout safeailab has no such norm.")
    if layer.get("num_hidden_layers") != 1:
        raise CheckpointError(
            f"{where}: num_hidden_layers is {layer.get('num_hidden_layers')}; the layout {layout} has one draft layer."
        )
    if layer.get("model_type") != "llama":
        raise CheckpointError(
            f"{where}: the draft layers are of type {layer.get('model_type')!r}; the layout {layout} has llama's."
        )
    ids = _layer_ids(config, AUX_KEY, where)
    if len(ids) != 3:
        raise CheckpointError(f"{where}: {AUX_KEY} is {ids}; the layout {layout} has three auxiliary layers.")
    if ids[0] == 1:
        raise CheckpointError(
            f"{where}: {AUX_KEY} is {ids}. The layout {layout} cannot say that: SGLang takes a first id of 1 for a sign"
            " that layer outputs are counted."
        )
    notes = []
    if ids[0] != 2:
        notes.append(
            f"auxiliary layers {ids} are stored as they are, as SGLang reads them since its pull request 25454; before,"
            " and in SpecForge, they would count layer outputs"
        )
    if layout == "safeailab":
        notes.append("SafeAILab's code reads layers 2, L//2 and L-3 of the verifier, whatever config.json says")
        if num_layers is not None and ids != (default := default_aux_layer_ids(num_layers)):
            raise CheckpointError(
                f"{where}: {AUX_KEY} is {ids}; SafeAILab's code always reads {default} of this verifier."
            )
    described = {
        **_layer_keys(config, layer),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.get("draft_vocab_size"),
        # Counted as outputs where the first is 2: that is what SpecForge and every SGLang read the same way.
        "eagle_config": {AUX_KEY: [layer_id - 1 for layer_id in ids] if ids[0] == 2 else ids},
        **dict.fromkeys(beyond, True),
    }
    if config.get("target_hidden_size") != layer.get("hidden_size"):
        described["target_hidden_size"] = config.get("target_hidden_size")
    return described, notes


def describe_dflash(config: dict[str, Any], num_layers: int | None, where: Path) -> tuple[dict[str, Any], list[str]]:
    """The config.json that a DFlash drafter in the speculators format has in z-lab's layout.

    Args, returns and errors as in :func:`describe_eagle3`.
    """
    layer = _section(config, "transformer_layer_config", where)
    ids = _layer_ids(config, DFlashConfig.aux_key, where)
    own = _own_keys(DFlashConfig, config, where)
    if own["sliding_window"] is not None:
        raise CheckpointError(f"{where}: sliding_window is set; in the layout z-lab such layers are causal in a block.")
    if own["sample_from_anchor"]:
        raise CheckpointError(f"{where}: sample_from_anchor is true; the layout z-lab drafts from mask tokens only.")
    if config.get("draft_vocab_size") != layer.get("vocab_size"):
        raise CheckpointError(
            f"{where}: the draft vocabulary is reduced; the layout z-lab has the verifier's, with the verifier's"
            " lm_head."
        )
    if min(ids) < 1:
        raise CheckpointError(f"{where}: {DFlashConfig.aux_key} is {ids}; z-lab's ids cannot name the embedding, 0.")
    described = {
        "layer_types": ["full_attention"] * _integer(layer, "num_hidden_layers", where),
        **_layer_keys(config, layer),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": own["block_size"],
        "dflash_config": {
            "mask_token_id": own["mask_token_id"],
            "target_layer_ids": [layer_id - 1 for layer_id in ids],
        },
    }
    if num_layers is None:
        return described, [
            "the verifier is not a folder here, so num_target_layers (its decoder layers) is left out; SGLang needs it"
        ]
    return {**described, "num_target_layers": num_layers}, []


def _layer_keys(config: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in layer.items() if key != "dtype"}
    return {**own, "torch_dtype": config.get("dtype")}


def _own_keys(kind: type[DrafterConfig], config: dict[str, Any], where: Path) -> dict[str, Any]:
    try:
        return kind.read_own_keys(config)
    except KeyError as error:
        raise CheckpointError(f"{where} lacks {error.args[0]}.") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}.") from error


def _section(config: dict[str, Any], key: str, where: Path) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} is {value!r}; it must be an object.")
    return value


def _integer(config: Mapping[str, Any], key: str, where: Path, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{where} lacks {key}.")
    if type(value) is not int or value < least:
        raise CheckpointError(f"{where}: {key} is {value!r}; it must be a whole number, at least {least}.")
    return value


def _layer_ids(config: Mapping[str, Any], key: str, where: Path) -> list[int]:
    ids = config.get(key)
    if ids is None:
        raise CheckpointError(f"{where} lacks {key}.")
    are_numbers = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    if not are_numbers or not ids or len(set(ids)) < len(ids):
        raise CheckpointError(f"{where}: {key} is {ids!r}; it must be a list of different layer numbers.")
    return ids


def _expect_fixed(values: Mapping[str, Any], fixed: Mapping[str, Any], where: Path) -> None:
    for key, wanted in fixed.items():
        if (found := values.get(key)) is not None and found != wanted:
            raise CheckpointError(f"{where}: {key} is {found!r}; drafters here have {wanted!r}.")
