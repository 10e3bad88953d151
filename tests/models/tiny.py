"""Tiny verifiers and drafters on disk, for tests that need files but no real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators.data.vocabulary import VocabMapping
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter
from speculators.verifier import Verifier, read_verifier

VOCAB, HIDDEN, LAYERS = 40, 24, 8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 36,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def head_tensors(seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a verifier's head, under Llama's names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.rand(HIDDEN, generator=generator) + 0.5,
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
    }


def write_verifier(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Verifier:
    """A checkpoint that holds no more than the head; ``changes`` to its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(head_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return read_verifier(folder, str(folder), None, folder.parent / "cache")


def drafter_config(**changes: Any) -> Eagle3Config:
    """The drafter for the tiny verifier."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "target_hidden_size": HIDDEN,
        "aux_layer_ids": (2, 4, 5),
    }
    return Eagle3Config(**{**values, **changes})


def make_drafter(**changes: Any) -> Eagle3Drafter:
    """A drafter with random weights."""
    torch.manual_seed(0)
    drafter = Eagle3Drafter(drafter_config(**changes))
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    return drafter


def make_mapping() -> VocabMapping:
    """Every odd token below 32 is kept."""
    kept = torch.arange(16) * 2 + 1
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    return VocabMapping(t2d, kept - torch.arange(16))
