"""Attention of draft layers: the training-time-test pattern over packed documents, and plain cached decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from speculators.models.layers import RMSNorm, RotaryEmbedding, rotate


@dataclass
class StepKeys:
    """Keys and values of one layer from every training-time-test step so far, each [B, heads, S, head_dim]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass
class KeyValueCache:
    """Keys and values of one layer for decoding, each [1, kv_heads, tokens, head_dim]."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens and return all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


def document_mask(document_ids: Tensor) -> Tensor:
    """bool [B, 1, S, S]: a query sees keys up to its own position in its own document.

    Padding (-1) sees itself only, so that its softmax stays finite.
    """
    size = document_ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=document_ids.device).tril()
    same = document_ids[:, :, None] == document_ids[:, None, :]
    real = (document_ids >= 0)[:, :, None]
    itself = torch.eye(size, dtype=torch.bool, device=document_ids.device)
    return ((same & real & causal) | itself)[:, None]


def take(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, S, ...] at positions [B, Q] of each row: [B, Q, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


class DraftAttention(nn.Module):
    """Grouped-query attention of one draft layer.

    Args:
        input_size: Width of the layer's input: 2H in EAGLE-3's first layer, else H.
        norm_eps: Of the norms on queries and keys in Qwen3-style layers; None for Llama's, which have none.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        if norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, norm_eps), RMSNorm(head_dim, norm_eps)
        self.has_norms = norm_eps is not None
        self._rotary = (rotary,)  # in a tuple: shared by all layers, and no submodule of any of them

    def forward(
        self, x: Tensor, positions: Tensor, past: StepKeys, mask: Tensor, queried: Tensor | None = None
    ) -> Tensor:
        """One training-time-test step.

        A query attends to the step-0 keys that ``mask`` allows and to its own diagonal in every later step: those are
        one scalar score each, so no (k+1)S keys are ever built (arXiv 2503.01840, figure 6).

        Args:
            x: [B, Q, input_size], where Q may be fewer than step 0's S positions; of a later step's drafts the first Q
                go on.
            positions: int64 [B, Q], RoPE positions of this step.
            past: Keys and values of earlier steps; this step's are added.
            mask: bool [B, 1, Q, S] over step-0 keys.
            queried: int64 [B, Q]: positions of x that ask, where x has more (step 0, whose keys all later steps need).

        Returns:
            [B, Q, H].
        """
        queries, keys, values = self._project(x, positions, queried)
        past.keys.append(self._repeat(keys))
        past.values.append(self._repeat(values))
        scale = 1 / math.sqrt(self.head_dim)
        causal = (queries @ past.keys[0].transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
        asking = queries.shape[2]
        diagonal = [(queries * k[:, :, :asking]).sum(dim=-1, keepdim=True) * scale for k in past.keys[1:]]
        weights = torch.cat([causal, *diagonal], dim=-1).softmax(dim=-1)
        size = mask.shape[-1]
        mixed = weights[..., :size] @ past.values[0]
        for step, value in enumerate(past.values[1:]):
            mixed = mixed + weights[..., size + step, None] * value[:, :, :asking]
        return self._output(mixed)

    def decode(self, x: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """Causal attention of n new tokens over cached and new ones; x is [1, n, input_size]."""
        queries, keys, values = self._project(x, positions)
        keys, values = cache.append(keys, values)
        keys, values = self._repeat(keys), self._repeat(values)
        new, total = x.shape[1], keys.shape[2]
        mask = torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)
        scores = (queries @ keys.transpose(-1, -2) / math.sqrt(self.head_dim)).masked_fill(~mask, float("-inf"))
        return self._output(scores.softmax(dim=-1) @ values)

    def _project(self, x: Tensor, positions: Tensor, queried: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = self._rotary[0](positions, x.dtype)
        keys, values = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        key_cos, key_sin = cos, sin
        if queried is not None:
            x, cos, sin = take(x, queried), take(cos, queried), take(sin, queried)
        queries = self._heads(self.q_proj(x))
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, cos, sin), rotate(keys, key_cos, key_sin)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1)

    def _output(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
