"""Tiny verifiers with an MTP head, one for each family that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.verifier import Verifier, read_verifier
from tests.models.tiny import HIDDEN, VOCAB

LAYERS, EXPERTS = 4, 4
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 36,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
_QWEN_NEXT = {"head_dim": 8, "rope_parameters": {**_COMMON["rope_parameters"], "partial_rotary_factor": 0.5}}
_QWEN_MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
}
_ROUTED = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {
        **_COMMON,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    },
    "qwen3_next": {
        **_COMMON,
        **_QWEN_NEXT,
        **_QWEN_MOE,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**_COMMON, **_QWEN_NEXT, "model_type": "qwen3_5_text"},
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {**_COMMON, **_QWEN_NEXT, **_QWEN_MOE, "model_type": "qwen3_5_moe_text"},
    },
    "deepseek_v3": {
        **_COMMON,
        **_ROUTED,
        "num_key_value_heads": 4,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "glm4_moe": {
        **_COMMON,
        **_ROUTED,
        "head_dim": 8,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}


def _qwen(mlp: list[str]) -> set[str]:
    layer = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight", *(f"mlp.{name}" for name in mlp)]
    around = {"fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"}
    return {f"mtp.{name}" for name in around} | {f"mtp.layers.0.{name}" for name in layer}


def _dense(module: str = "") -> list[str]:
    return [f"{module}{part}_proj.weight" for part in ("gate", "up", "down")]


def _experts() -> list[str]:
    return [name for index in range(EXPERTS) for name in _dense(f"experts.{index}.")]


def _deepseek(attention: list[str]) -> set[str]:
    names = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"]
    names += ["post_attention_layernorm.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
    names += [f"mlp.{name}" for name in [*_experts(), *_dense("shared_experts.")]]
    names += [f"self_attn.{name}" for name in attention]
    return {f"model.layers.{LAYERS}.{name}" for name in names}


_SHARED = ["gate.weight", "shared_expert_gate.weight", *_dense("shared_expert.")]
# What the families' own checkpoints call the tensors of the head.
NAMES: dict[str, set[str]] = {
    "mimo": {
        f"model.mtp_layers.0.{name}"
        for name in [
            *("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
            *("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"),
            *(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
            *_dense("mlp."),
        ]
    },
    "qwen3_next": _qwen([*_SHARED, *_experts()]),
    "qwen3_5": _qwen(_dense()),
    "qwen3_5_moe": _qwen([*_SHARED, "experts.gate_up_proj", "experts.down_proj"]),
    "deepseek_v3": _deepseek(
        [
            *("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight"),
            *("kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"),
        ]
    ),
    "glm4_moe": _deepseek(
        [
            *(f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
            *("o_proj.weight", "q_norm.weight", "k_norm.weight"),
        ]
    ),
}


def head_tensors(family: str, drafter: MtpDrafter) -> dict[str, Tensor]:
    """Random tensors for a head, under the names that the family's checkpoints have; fused experts are split."""
    tensors = {}
    for name, tensor in drafter.stored_tensors().items():
        value = torch.randn(tensor.shape, dtype=torch.float64) * 0.3
        module, _, part = name.rpartition(".")
        if name in NAMES[family]:
            tensors[name] = value
        elif part == "down_proj":
            tensors |= {f"{module}.{index}.down_proj.weight": value[index] for index in range(EXPERTS)}
        else:
            for index, both in enumerate(value):
                tensors[f"{module}.{index}.gate_proj.weight"] = both[: len(both) // 2]
                tensors[f"{module}.{index}.up_proj.weight"] = both[len(both) // 2 :]
    return tensors


def write_mtp_verifier(folder: Path, family: str) -> tuple[Verifier, dict[str, Tensor]]:
    """A checkpoint that holds no more than the verifier's ends and its MTP head, in float32; and that head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    torch.manual_seed(0)
    head = head_tensors(family, MtpDrafter(MtpConfig.for_folder(folder)))
    head = {name: tensor.float().contiguous() for name, tensor in head.items()}
    language_model = "language_model." if "text_config" in CONFIGS[family] else ""
    ends = {
        f"model.{language_model}embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        f"model.{language_model}norm.weight": torch.rand(HIDDEN) + 0.5,
        "lm_head.weight": torch.randn(VOCAB, HIDDEN),
    }
    save_file({**ends, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    return read_verifier(folder, str(folder), None, folder.parent / "cache"), head
