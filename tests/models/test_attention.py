"""Attention of training-time test against one dense softmax over all steps' keys; parts against the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators.models import attention
from speculators.models.attention import DraftAttention, StepKeys, attend, document_mask
from speculators.models.layers import RotaryEmbedding

HEADS, SIZE, DIM, STEPS = 2, 7, 4, 3


def dense(queries: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """All steps' keys side by side, (K + 1) S of them, under one mask: step 0's, and the diagonals of the others."""
    diagonal = torch.eye(SIZE, dtype=torch.bool).expand_as(mask)
    allowed = torch.cat([mask, *[diagonal] * (len(keys) - 1)], dim=-1)
    scores = queries @ torch.cat(keys, dim=2).transpose(-1, -2)
    return scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1) @ torch.cat(values, dim=2)


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_merging_by_log_sum_exp_is_the_dense_softmax(scale: float) -> None:
    """Output and gradients, also where scores are so large that a softmax is one-hot."""
    torch.manual_seed(0)
    shape = (2, HEADS, SIZE, DIM)
    inputs = [(scale * torch.randn(shape, dtype=torch.float64)).requires_grad_() for _ in range(1 + 2 * STEPS)]
    queries, keys, values = inputs[0], inputs[1 : 1 + STEPS], inputs[1 + STEPS :]
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0]]))
    own = [x for pair in zip(keys[1:], values[1:], strict=True) for x in pair]
    merged, expected = attend(queries, keys[0], values[0], mask, own), dense(queries, keys, values, mask)
    torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    found = torch.autograd.grad((merged * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * scale)


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(DIM, {"rope_type": "default", "rope_theta": 100.0})
    layer = DraftAttention(6, 6, HEADS, 1, DIM, rotary).double()
    mask = document_mask(torch.zeros(2, SIZE, dtype=torch.long))
    inputs = [torch.randn(2, SIZE, 6, dtype=torch.float64, requires_grad=True) for _ in range(STEPS)]

    def run() -> tuple[Tensor, ...]:
        past = StepKeys()
        outputs = [layer(x, torch.arange(SIZE).expand(2, -1) + k, past, mask) for k, x in enumerate(inputs)]
        total = sum(output.square().sum() for output in outputs)
        return (*outputs, *torch.autograd.grad(total, [*inputs, *layer.parameters()]))

    whole = run()
    monkeypatch.setattr(attention, "MAX_SCORES", 2 * HEADS * SIZE * 3)  # three queries at once
    for one, other in zip(run(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
