"""Divergences between the verifier's distribution p and the drafter's q, per position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def kl_divergence(draft_logits: Tensor, target_log_probabilities: Tensor) -> Tensor:
    """KL(p || q) in nats over the last dimension.

    Computed from log-probabilities throughout, so logits of any finite size stay finite.

    Args:
        draft_logits: [n, V], whose softmax is q.
        target_log_probabilities: [n, V], log p: ``log_softmax`` of the verifier's logits.

    Returns:
        [n], at least 0 up to rounding.
    """
    log_q = draft_logits.log_softmax(dim=-1)
    return F.kl_div(log_q, target_log_probabilities, reduction="none", log_target=True).sum(dim=-1)


def head_divergence(hidden: Tensor, lm_head: Tensor, target_logits: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Summed KL divergence of several draft steps against the same targets, lm_head included.

    The same numbers as :func:`kl_divergence` of ``hidden[k] @ lm_head.T``, with much less memory traffic: for the
    drafter's logits z, the divergence is ``sum p log p - p.z + logsumexp(z)`` and its gradient in z is ``q - p``, which
    is all that is kept for the backward pass.

    Args:
        hidden: [K, n, H].
        lm_head: [V, H].
        target_logits: [n, V], constant.
        counted: bool [K, n]; rows that do not count add nothing.

    Returns:
        Sums in nats [K], and the best token of each row, int64 [K, n].
    """
    return _HeadDivergence.apply(hidden, lm_head, target_logits, counted)


class _HeadDivergence(torch.autograd.Function):
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
        expected = torch.linalg.vecdot(logits, p)
        q = logits.softmax(dim=-1)
        log_total = largest - q.gather(-1, best[..., None])[..., 0].log()
        sums = torch.where(counted, negative_entropy - expected + log_total, 0.0).sum(dim=-1)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, lm_head, q.sub_(p), counted)
        ctx.mark_non_differentiable(best)
        return sums, best

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, difference, counted = ctx.saved_tensors
        scale = (grad[:, None] * counted)[..., None].to(difference.dtype)
        grad_hidden = (difference @ lm_head) * scale
        grad_head = difference.flatten(0, 1).T @ (hidden * scale).flatten(0, 1)
        return grad_hidden.to(hidden.dtype), grad_head.to(lm_head.dtype), None, None
