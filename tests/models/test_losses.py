"""Divergences against closed forms."""

from __future__ import annotations

import math

import torch

from speculators.models.losses import head_divergence, kl_divergence


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


def test_the_heads_divergence_is_the_sum_over_counted_rows() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    lm_head = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = 3 * torch.randn(5, 7, dtype=torch.float64)
    counted = torch.rand(3, 5) < 0.6
    sums, best = head_divergence(hidden, lm_head, targets, counted)
    logits = hidden @ lm_head.T
    rows = kl_divergence(logits.flatten(0, 1), targets.log_softmax(-1).repeat(3, 1)).view(3, 5)
    torch.testing.assert_close(sums, (rows * counted).sum(-1))
    assert torch.equal(best, logits.argmax(-1))
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    expected = torch.autograd.grad((weights * (rows * counted).sum(-1)).sum(), (hidden, lm_head))
    torch.testing.assert_close(torch.autograd.grad((weights * sums).sum(), (hidden, lm_head)), expected)


def test_the_heads_divergence_stays_finite_for_large_logits() -> None:
    hidden = torch.tensor([[[1e4, -1e4]]], requires_grad=True)
    lm_head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    sums, _ = head_divergence(hidden, lm_head, torch.tensor([[0.0, 1e4, -1e4]]), torch.ones(1, 1, dtype=torch.bool))
    sums.sum().backward()
    assert sums.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_the_heads_divergence_without_rows() -> None:
    lm_head = torch.randn(7, 4, requires_grad=True)
    counted = torch.zeros(3, 0, dtype=torch.bool)
    sums, best = head_divergence(torch.randn(3, 0, 4, requires_grad=True), lm_head, torch.randn(0, 7), counted)
    sums.sum().backward()
    assert best.shape == (3, 0)
    assert lm_head.grad is not None
    assert not lm_head.grad.any()
