"""What training reports: losses and accuracies of each step of the unrolled drafter."""

from __future__ import annotations

import itertools

import torch

ROWS = ("loss", "positions", "correct", "eligible", "eligible_correct")


class StepSums:
    """Sums over positions, from which losses and accuracies follow; sums of ranks and batches simply add up.

    Attributes:
        values: float64 [5, K] on the CPU, for the K draft positions: loss; positions with a loss; those
            predicted right; those where all earlier steps were right; those of them that this step got right too.
    """

    def __init__(self, steps: int, values: torch.Tensor | list[list[float]] | None = None) -> None:
        self.values = torch.zeros(len(ROWS), steps, dtype=torch.float64)
        if values is not None:
            self.add(torch.as_tensor(values, dtype=torch.float64))

    def add(self, values: torch.Tensor) -> None:
        """Add the sums of a batch, [5, K]."""
        self.values += values.to("cpu", torch.float64)

    def clear(self) -> None:
        """Start again from zero."""
        self.values.zero_()

    def figures(self, weights: torch.Tensor, prefix: str = "") -> dict[str, float]:
        """Loss (the steps' means, weighted by ``weights`` [K] and summed), and each step's accuracies.

        ``conditional_accuracy_step_k`` counts only positions where all earlier steps were right.
        """
        loss, positions, correct, eligible, eligible_correct = self.values
        figures = {f"{prefix}loss": float((weights.to("cpu", torch.float64) * loss / positions.clamp(min=1)).sum())}
        for k in range(self.values.shape[1]):
            figures[f"{prefix}accuracy_step_{k}"] = float(correct[k] / positions[k].clamp(min=1))
            figures[f"{prefix}conditional_accuracy_step_{k}"] = float(eligible_correct[k] / eligible[k].clamp(min=1))
        return figures

    def predicted_acceptance_length(self) -> float:
        """Tokens per verifier pass that greedy serving would emit, as far as the K steps tell.

        ``1 + c0 + c0 c1 + ...`` with c_k the conditional accuracies: the chance that the first k + 1 draft tokens are
        all accepted, summed, and the verifier's own token.
        """
        eligible, eligible_correct = self.values[3], self.values[4]
        conditional = (eligible_correct / eligible.clamp(min=1)).tolist()
        return 1.0 + sum(itertools.accumulate(conditional, lambda a, b: a * b))
