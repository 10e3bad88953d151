"""What follows from an evaluation's measurements: figures, and one row a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from speculators.data.prepare import EvaluationPrompt
from speculators.evaluation.acceptance import Acceptance, Divergence, ServerRun, first_difference
from speculators.evaluation.reference import ReferenceResult


@dataclass
class Outcome:
    """All that was measured, and what follows from it.

    Attributes:
        reference: The reference decoder's results by sample; empty when it was not asked for.
    """

    with_drafter: ServerRun
    without_drafter: ServerRun
    divergences: list[Divergence]
    reference: dict[str, ReferenceResult]

    @property
    def reference_acceptance(self) -> Acceptance:
        """The reference decoder's acceptance over all its prompts."""
        return sum((result.acceptance for result in self.reference.values()), Acceptance())

    def figures(self, predicted_acceptance_length: float | None, comparable: bool) -> dict[str, Any]:
        """The manifest's figures.

        Args:
            predicted_acceptance_length: What training predicted.
            comparable: Whether that prediction is for drafts as long as vLLM's.
        """
        a, b, n = self.with_drafter, self.without_drafter, len(self.with_drafter.outputs)
        near_ties = sum(divergence.near_tie for divergence in self.divergences)
        figures: dict[str, Any] = {
            **{k: v for k, v in a.acceptance.figures().items() if k != "accepted_per_position"},
            "held_out_prompts": n,
            "generated_tokens_with": a.generated_tokens,
            "generated_tokens_without": b.generated_tokens,
            "tokens_per_s_with": a.tokens_per_s,
            "tokens_per_s_without": b.tokens_per_s,
            "throughput_ratio": a.tokens_per_s / b.tokens_per_s if b.tokens_per_s else None,
            "identical_share": 1 - len(self.divergences) / n,
            "divergences": len(self.divergences),
            "near_ties": near_ties,
            "not_near_tie": len(self.divergences) - near_ties,
            "counters_disturbed": bool(a.disturbances),
        }
        if self.reference:
            reference, counted = self.reference_acceptance.length, a.group_acceptance[0].length
            same = sum(result.token_ids == a.outputs[key] for key, result in self.reference.items())
            figures |= {
                "reference_prompts": len(self.reference),
                "reference_acceptance_length": reference,
                "reference_relative_difference": reference / counted - 1,
                "reference_identical_share": same / len(self.reference),
            }
        if predicted_acceptance_length is not None:
            figures["predicted_acceptance_length"] = predicted_acceptance_length
            if comparable:
                figures["training_gap"] = a.acceptance.length / predicted_acceptance_length - 1
        return figures

    def rows(self, prompts: Sequence[EvaluationPrompt]) -> pd.DataFrame:
        """One row a prompt."""
        divergences = {divergence.sample_id: divergence for divergence in self.divergences}
        rows = []
        for prompt in prompts:
            with_tokens = self.with_drafter.outputs[prompt.sample_id]
            without_tokens = self.without_drafter.outputs[prompt.sample_id]
            divergence = divergences.get(prompt.sample_id)
            reference = self.reference.get(prompt.sample_id)
            rows.append(
                {
                    "sample_id": prompt.sample_id,
                    "prompt_id": prompt.prompt_id,
                    "prompt_tokens": len(prompt.prompt_token_ids),
                    "output_tokens": len(with_tokens),
                    "output_tokens_without": len(without_tokens),
                    "finish_reason": self.with_drafter.finish_reasons[prompt.sample_id],
                    "identical": divergence is None,
                    "first_difference": divergence.position if divergence else None,
                    "gap": divergence.gap if divergence else None,
                    "near_tie": divergence.near_tie if divergence else None,
                    "reference_drafts": reference.acceptance.drafts if reference else None,
                    "reference_accepted": reference.acceptance.accepted_tokens if reference else None,
                    "reference_first_difference": first_difference(reference.token_ids, with_tokens)
                    if reference
                    else None,
                    "token_ids": with_tokens,
                    "token_ids_without": without_tokens,
                }
            )
        optional = dict.fromkeys(
            ("first_difference", "reference_drafts", "reference_accepted", "reference_first_difference"), "Int64"
        )
        return pd.DataFrame(rows).astype({**optional, "gap": "Float64", "near_tie": "boolean"})
