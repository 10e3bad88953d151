"""Losses between the verifier's distribution p and the drafter's q over the draft vocabulary, row by row.

``kl_div`` KL(p||q), ``rkl`` KL(q||p), ``jsd`` Jensen-Shannon, ``ce`` cross entropy against p's best token, ``tv`` total
variation ``1 - sum min(p, q)`` (the chance that a draft sampled from q is rejected, arXiv 2211.17192), ``nla``
``-log sum min(p, q)``, ``lk_hybrid`` KL where the drafter is far off and total variation where it is near
(arXiv 2602.23881). All in nats but ``tv``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speculators.config import LossName

LossWeights = Mapping[LossName, float]

# Above this many logits (rows x draft vocabulary) they are computed in chunks that are recomputed in backward.
MAX_LOGITS = 1 << 26
_HYBRID_SHARPNESS = 3.0
_TINY = 1e-9


class Distributions:
    """The verifier's and the drafter's distributions, from their logits.

    Args:
        draft_logits: [..., V].
        target_logits: [..., V], broadcast against the drafter's; constant.
    """

    def __init__(self, draft_logits: Tensor, target_logits: Tensor) -> None:
        wide = torch.promote_types(draft_logits.dtype, torch.float32)
        self.log_q = draft_logits.to(wide).log_softmax(dim=-1)
        self.log_p = target_logits.detach().to(wide).log_softmax(dim=-1)

    @cached_property
    def p(self) -> Tensor:
        """The verifier's probabilities."""
        return self.log_p.exp()

    @cached_property
    def q(self) -> Tensor:
        """The drafter's probabilities."""
        return self.log_q.exp()

    @cached_property
    def overlap(self) -> Tensor:
        """``sum min(p, q)``: the chance that the verifier accepts a token sampled from q."""
        return torch.minimum(self.p, self.q).sum(dim=-1)

    def kl_div(self) -> Tensor:
        """KL(p||q)."""
        return (self.p * (self.log_p - self.log_q)).sum(dim=-1)

    def rkl(self) -> Tensor:
        """KL(q||p)."""
        return (self.q * (self.log_q - self.log_p)).sum(dim=-1)

    def jsd(self) -> Tensor:
        """Half of KL(p||m) and half of KL(q||m), m being the mean of both."""
        log_m = torch.logaddexp(*torch.broadcast_tensors(self.log_p, self.log_q)) - torch.tensor(2.0).log()
        return 0.5 * (self.p * (self.log_p - log_m) + self.q * (self.log_q - log_m)).sum(dim=-1)

    def ce(self) -> Tensor:
        """``-log q`` of p's best token."""
        best = self.log_p.argmax(dim=-1, keepdim=True).expand(*self.log_q.shape[:-1], 1)
        return -self.log_q.gather(-1, best)[..., 0]

    def tv(self) -> Tensor:
        """``1 - overlap``."""
        return 1 - self.overlap

    def nla(self) -> Tensor:
        """``-log overlap``: likelihood of acceptance."""
        return -self.overlap.clamp(min=_TINY).log()

    def lk_hybrid(self) -> Tensor:
        """``w KL + (1 - w) TV`` with ``w = exp(-3 overlap)``, which is constant in the gradient."""
        weight = (-_HYBRID_SHARPNESS * self.overlap).exp().detach()
        return weight * self.kl_div() + (1 - weight) * self.tv()

    def loss(self, weights: LossWeights) -> Tensor:
        """The weighted sum of losses, [...]."""
        parts = [weight * getattr(self, name)() for name, weight in weights.items()]
        return torch.stack(parts).sum(dim=0)


def head_losses(
    hidden: Tensor, lm_head: Tensor, target_logits: Tensor, counted: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor]:
    """Losses of K draft positions against the same targets, lm_head included.

    Args:
        hidden: [n, K, H].
        lm_head: [V, H].
        target_logits: [n, V], constant.
        counted: bool [n, K]; losses that do not count are zero, as is their gradient.
        weights: Which losses, and how much of each.

    Returns:
        Losses [n, K], and the best token of each row, int64 [n, K].
    """
    if dict(weights) == {"kl_div": 1.0}:
        return _HeadDivergence.apply(hidden, lm_head, target_logits, counted)
    logits = F.linear(hidden, lm_head)
    losses = Distributions(logits, target_logits[:, None]).loss(weights)
    return torch.where(counted, losses, 0.0), logits.detach().argmax(dim=-1)


class _HeadDivergence(torch.autograd.Function):
    """KL(p||q) with much less memory traffic than autograd's: for the drafter's logits z it is
    ``sum p log p - p.z + logsumexp(z)``, and its gradient in z is ``q - p``, all that is kept for the backward pass."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, target_logits: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits, targets = F.linear(hidden, lm_head).to(wide), target_logits.to(wide)
        p = targets.softmax(dim=-1)
        negative_entropy = torch.linalg.vecdot(p, targets) - targets.logsumexp(dim=-1)
        largest, best = logits.max(dim=-1)
        expected = torch.linalg.vecdot(logits, p[:, None])
        q = logits.softmax(dim=-1)
        log_total = largest - q.gather(-1, best[..., None])[..., 0].log()
        losses = torch.where(counted, negative_entropy[:, None] - expected + log_total, 0.0)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, lm_head, q.sub_(p[:, None]), counted)
        ctx.mark_non_differentiable(best)
        return losses, best

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, difference, counted = ctx.saved_tensors
        scale = (grad * counted)[..., None].to(difference.dtype)
        grad_hidden = ((difference @ lm_head.to(difference.dtype)) * scale).to(hidden.dtype)
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = (difference.flatten(0, 1).T @ (hidden * scale).flatten(0, 1)).to(lm_head.dtype)
        return grad_hidden, grad_head, None, None


def in_chunks(compute: Callable[..., tuple[Tensor, ...]], rows_at_once: int, *arguments: Tensor) -> tuple[Tensor, ...]:
    """Compute chunk by chunk over the first dimension, which all arguments and results share.

    With more than one chunk, what a chunk computes is thrown away and computed again in the backward pass: the memory
    is that of one chunk.
    """
    rows = len(arguments[0])
    if rows <= rows_at_once:
        return compute(*arguments)
    results = []
    for chunk in zip(*(argument.split(rows_at_once) for argument in arguments), strict=True):
        if torch.is_grad_enabled():
            results.append(checkpoint(compute, *chunk, use_reentrant=False))
        else:
            results.append(compute(*chunk))
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
