"""Divergences between the verifier's distribution p and the drafter's q, per position."""

from __future__ import annotations

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
