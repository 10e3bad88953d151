"""Divergences between the verifier's distribution p and the drafter's q, per position."""

from __future__ import annotations

from torch import Tensor


def kl_divergence(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(p || q) in nats over the last dimension, with p from ``target_logits`` and q from ``draft_logits``.

    Computed from log-probabilities throughout, so logits of any finite size stay finite.

    Args:
        draft_logits: [n, V].
        target_logits: [n, V].

    Returns:
        [n], at least 0 up to rounding.
    """
    log_p = target_logits.log_softmax(dim=-1)
    log_q = draft_logits.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
