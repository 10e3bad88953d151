"""The verifier's own head: embedding, final norm and lm_head, read from its checkpoint without loading the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.errors import CheckpointError
from speculators.models.layers import rms_norm
from speculators.verifier import Verifier

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "transformer.", "")
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_SHIFTED_NORM_TYPES = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text")
_LAYER_NORM_TYPES = ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "stablelm")


class VerifierHead(nn.Module):
    """Turns the verifier's last hidden state into its logits at the kept token ids. Nothing in here is trained.

    Attributes:
        embed_tokens: [V, H].
        lm_head: [Vd, H], the rows at the kept ids.
        norm_weight: [H], the final norm's weight as it multiplies (Gemma's ``1 + w`` already added).
    """

    embed_tokens: Tensor
    lm_head: Tensor
    norm_weight: Tensor

    def __init__(self, embed_tokens: Tensor, lm_head: Tensor, norm_weight: Tensor, norm_eps: float) -> None:
        super().__init__()
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.norm_eps = norm_eps

    @classmethod
    def load(cls, verifier: Verifier, kept_ids: Tensor | None, dtype: torch.dtype = torch.float32) -> VerifierHead:
        """Read the head of a verifier; see :meth:`read`."""
        return cls.read(verifier.path, verifier.config, kept_ids, dtype)

    @classmethod
    def read(
        cls, folder: Path, config: dict[str, Any], kept_ids: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> VerifierHead:
        """Read the head's tensors from a checkpoint's safetensors.

        Args:
            folder: The verifier's checkpoint.
            config: The text part of its config.json.
            kept_ids: int64 [Vd], ascending token ids of the draft vocabulary; None for all.
            dtype: dtype of the result.

        Raises:
            CheckpointError: A tensor is missing, or the final norm is of a kind that is not supported.
        """
        model_type = str(config.get("model_type", ""))
        if model_type in _LAYER_NORM_TYPES:
            raise CheckpointError(f"{folder}: verifiers of type {model_type!r} (LayerNorm) are not supported.")
        tensors = _Tensors(folder)
        embed = tensors.first([f"{prefix}embed_tokens.weight" for prefix in _PREFIXES])
        norm = tensors.first([f"{prefix}norm.weight" for prefix in _PREFIXES])
        if config.get("tie_word_embeddings") and not tensors.has(_HEAD_NAMES):
            head = embed
        else:
            head = tensors.first(_HEAD_NAMES)
        norm = norm.to(dtype)
        if model_type in _SHIFTED_NORM_TYPES:
            norm = norm + 1
        head = head if kept_ids is None else head[kept_ids]
        eps = float(config.get("rms_norm_eps", 1e-6))
        return cls(embed.to(dtype), head.to(dtype), norm, eps)

    @torch.no_grad()
    def logits(self, last_state: Tensor) -> Tensor:
        """The verifier's logits [n, Vd] from its last states [n, H] (before the final norm)."""
        return F.linear(rms_norm(last_state, self.norm_weight, self.norm_eps), self.lm_head)


class _Tensors:
    """Tensors of a checkpoint by name, whichever file they lie in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            self.files = {}
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    self.files.update(dict.fromkeys(opened.keys(), file.name))

    def has(self, names: Sequence[str]) -> bool:
        return any(name in self.files for name in names)

    def first(self, names: Sequence[str]) -> Tensor:
        for name in names:
            if name in self.files:
                with safe_open(self.folder / self.files[name], framework="pt") as opened:
                    return opened.get_tensor(name)
        raise CheckpointError(f"{self.folder} has no tensor named {' or '.join(names)}.")
