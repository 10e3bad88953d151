"""Divergences against closed forms."""

from __future__ import annotations

import math

import torch

from speculators.models.losses import kl_divergence


def test_kl_of_two_coins() -> None:
    p, q = 0.8, 0.3
    logits = [torch.tensor([[math.log(x), math.log(1 - x)]], dtype=torch.float64) for x in (q, p)]
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    torch.testing.assert_close(
        kl_divergence(logits[0], logits[1].log_softmax(-1)), torch.tensor([expected], dtype=torch.float64)
    )


def test_kl_of_equal_distributions_is_zero_also_when_shifted() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    torch.testing.assert_close(kl_divergence(logits + 3, logits.log_softmax(-1)), torch.zeros(5, dtype=torch.float64))


def test_gradient() -> None:
    torch.manual_seed(0)
    draft = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 6, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: kl_divergence(x, target), draft)


def test_finite_at_extremes() -> None:
    one_hot = torch.full((2, 4), -1e4)
    one_hot[0, 1], one_hot[1, 2] = 1e4, 1e4
    draft = one_hot.flip(0).clone().requires_grad_(True)
    loss = kl_divergence(draft, one_hot.log_softmax(-1))
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.full((2,), 2e4))
    assert draft.grad is not None
    assert draft.grad.isfinite().all()
