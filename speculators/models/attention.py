"""Attention of draft layers: the training-time-test pattern over packed documents, and plain cached decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speculators.models.layers import RMSNorm, RotaryEmbedding, rotate

# Above this many attention scores they are computed part by part, and again in the backward pass.
MAX_SCORES = 1 << 27


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


def rows_at_once(queries: Tensor, keys: int) -> int:
    """How many of the queries [B, heads, Q, head_dim] may be scored at once against so many keys."""
    return max(1, MAX_SCORES // (queries.shape[0] * queries.shape[1] * keys))


def in_parts(compute: Callable[..., Tensor], at_once: int, *arguments: Tensor) -> Tensor:
    """Compute part by part along dimension 2, which all arguments and the result share.

    With more than one part, nothing of a part but its result is kept: it is computed again in the backward pass.
    """
    total = arguments[0].shape[2]
    if total <= at_once:
        return compute(*arguments)
    parts = []
    for part in zip(*(x.split(at_once, dim=2) for x in arguments), strict=True):
        again = torch.is_grad_enabled()
        parts.append(checkpoint(compute, *part, use_reentrant=False) if again else compute(*part))
    return torch.cat(parts, dim=2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: Sequence[Tensor] = ()) -> Tensor:
    """Attention over common keys, and over further keys that each query has of its own.

    The own keys are merged in by the logarithm of the softmax's total, one scalar score each, so the keys of K steps
    never lie side by side.

    Args:
        queries: [B, heads, Q, head_dim], scaled.
        keys: [B, heads, S, head_dim].
        values: [B, heads, S, head_dim].
        mask: bool [B, 1, Q, S]; every query sees a key.
        own: Keys and values in turn, each [B, heads, Q, head_dim].

    Returns:
        [B, heads, Q, head_dim].
    """
    scores = (queries @ keys.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    mixed = scores.softmax(dim=-1) @ values
    if not own:
        return mixed
    total = scores.logsumexp(dim=-1, keepdim=True)
    for key, value in zip(own[::2], own[1::2], strict=True):
        score = (queries * key).sum(dim=-1, keepdim=True)
        merged = torch.logaddexp(total, score)
        mixed = (total - merged).exp() * mixed + (score - merged).exp() * value
        total = merged
    return mixed


def attend_steps(queries: Tensor, keys: Tensor, values: Tensor, past: StepKeys, mask: Tensor) -> Tensor:
    """Attention of one training-time-test step.

    A query attends to the step-0 keys that ``mask`` allows and to its own diagonal in every later step (arXiv
    2503.01840, figure 6); see :func:`attend`.

    Args:
        queries: [B, heads, Q, head_dim], scaled.
        keys: [B, kv_heads, Q, head_dim]; at step 0 of all S positions, as ``values``.
        past: Keys and values of earlier steps; this step's are added.
        mask: bool [B, 1, Q, S] over step-0 keys.

    Returns:
        [B, heads, Q, head_dim].
    """
    past.keys.append(_per_query_head(keys, queries))
    past.values.append(_per_query_head(values, queries))
    asking = queries.shape[2]
    own = [x[:, :, :asking] for pair in zip(past.keys[1:], past.values[1:], strict=True) for x in pair]
    return in_parts(
        lambda q, seen, *own: attend(q, past.keys[0], past.values[0], seen, own),
        rows_at_once(queries, mask.shape[-1]),
        *(queries, mask, *own),
    )


def attend_cached(queries: Tensor, keys: Tensor, values: Tensor, cache: KeyValueCache) -> Tensor:
    """Causal attention of n new tokens over cached and new ones; shapes as in :func:`attend_steps` with B = 1."""
    keys, values = cache.append(keys, values)
    new, total = queries.shape[2], keys.shape[2]
    mask = torch.ones(1, 1, new, total, dtype=torch.bool, device=queries.device).tril(total - new)
    return attend(queries, _per_query_head(keys, queries), _per_query_head(values, queries), mask)


def _per_query_head(x: Tensor, queries: Tensor) -> Tensor:
    """Keys or values [B, kv_heads, ...] repeated for each of the queries' heads."""
    return x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1)


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
        """One training-time-test step; see :func:`attend_steps`.

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
        return self._output(attend_steps(queries / math.sqrt(self.head_dim), keys, values, past, mask))

    def decode(self, x: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """Causal attention of n new tokens over cached and new ones; x is [1, n, input_size]."""
        queries, keys, values = self._project(x, positions)
        return self._output(attend_cached(queries / math.sqrt(self.head_dim), keys, values, cache))

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

    def _output(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
