"""Losses against closed forms, gradients against finite differences, lm_head with the loss against the plain way."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from speculators.config import LossName
from speculators.models.losses import Distributions, head_losses, in_chunks

NAMES: tuple[LossName, ...] = get_args(LossName)


def coin(p: float) -> Tensor:
    return torch.tensor([[math.log(p), math.log(1 - p)]], dtype=torch.float64)


def closed_form(name: LossName, p: float, q: float) -> float:
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    m = (p + q) / 2
    overlap = min(p, q) + min(1 - p, 1 - q)
    weight = math.exp(-3 * overlap)
    return {
        "kl_div": kl,
        "rkl": q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)),
        "jsd": 0.5 * (p * math.log(p / m) + (1 - p) * math.log((1 - p) / (1 - m)))
        + 0.5 * (q * math.log(q / m) + (1 - q) * math.log((1 - q) / (1 - m))),
        "ce": -math.log(q if p > 0.5 else 1 - q),
        "tv": abs(p - q),
        "nla": -math.log(overlap),
        "lk_hybrid": weight * kl + (1 - weight) * abs(p - q),
    }[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "q"), [(0.8, 0.3), (0.2, 0.9), (0.6, 0.6)])
def test_two_coins(name: LossName, p: float, q: float) -> None:
    loss = Distributions(coin(q) + 5, coin(p) - 2).loss({name: 1.0})  # logits may be shifted
    torch.testing.assert_close(loss, torch.tensor([closed_form(name, p, q)], dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: LossName) -> None:
    torch.manual_seed(0)
    draft = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 6, dtype=torch.float64)
    if name == "lk_hybrid":  # its weight is constant in the gradient, which finite differences do not know
        pair = Distributions(draft, target)
        weight = (-3 * pair.overlap).exp().detach()
        expected = torch.autograd.grad((weight * pair.kl_div() + (1 - weight) * pair.tv()).sum(), draft)
        found = torch.autograd.grad(Distributions(draft, target).loss({name: 1.0}).sum(), draft)
        torch.testing.assert_close(found, expected)
    else:
        assert torch.autograd.gradcheck(lambda x: Distributions(x, target).loss({name: 1.0}), draft)


@pytest.mark.parametrize("name", NAMES)
def test_finite_at_extremes(name: LossName) -> None:
    one_hot = torch.full((2, 4), -1e4)
    one_hot[0, 1], one_hot[1, 2] = 1e4, 1e4
    draft = one_hot.flip(0).clone().requires_grad_(True)
    loss = Distributions(draft, one_hot).loss({name: 1.0})
    loss.sum().backward()
    assert loss.isfinite().all()
    assert draft.grad is not None
    assert draft.grad.isfinite().all()


@pytest.mark.parametrize("weights", [{"kl_div": 1.0}, {"ce": 0.1, "tv": 0.9}, {"kl_div": 0.5}])
def test_head_losses_are_those_of_the_logits(weights: dict[LossName, float]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    lm_head = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = 3 * torch.randn(5, 7, dtype=torch.float64)
    counted = torch.rand(5, 3) < 0.6
    losses, best = head_losses(hidden, lm_head, targets, counted, weights)
    logits = hidden @ lm_head.T
    expected = sum(w * getattr(Distributions(logits, targets[:, None]), n)() for n, w in weights.items()) * counted
    torch.testing.assert_close(losses, expected)
    assert torch.equal(best, logits.argmax(-1))
    scale = torch.rand(5, 3, dtype=torch.float64)
    wanted = torch.autograd.grad((scale * expected).sum(), (hidden, lm_head))
    torch.testing.assert_close(torch.autograd.grad((scale * losses).sum(), (hidden, lm_head)), wanted)


def test_head_divergence_stays_finite_for_large_logits() -> None:
    hidden = torch.tensor([[[1e4, -1e4]]], requires_grad=True)
    lm_head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    counted = torch.ones(1, 1, dtype=torch.bool)
    losses, _ = head_losses(hidden, lm_head, torch.tensor([[0.0, 1e4, -1e4]]), counted, {"kl_div": 1.0})
    losses.sum().backward()
    assert losses.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("weights", [{"kl_div": 1.0}, {"tv": 1.0}])
def test_no_rows(weights: dict[LossName, float]) -> None:
    hidden, lm_head = torch.randn(0, 3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    losses, best = head_losses(hidden, lm_head, torch.randn(0, 7), torch.zeros(0, 3, dtype=torch.bool), weights)
    losses.sum().backward()
    assert best.shape == (0, 3)
    assert lm_head.grad is not None
    assert not lm_head.grad.any()


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_chunks_change_nothing(rows_at_once: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True)
    lm_head = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets, counted = torch.randn(8, 7, dtype=torch.float64), torch.rand(8, 2) < 0.7

    def compute(rows: Tensor, target: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return head_losses(rows, lm_head, target, counts, {"tv": 1.0})

    whole = compute(hidden, targets, counted)
    parts = in_chunks(compute, rows_at_once, hidden, targets, counted)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)
    expected = torch.autograd.grad(whole[0].sum(), (hidden, lm_head))
    torch.testing.assert_close(torch.autograd.grad(parts[0].sum(), (hidden, lm_head)), expected)
