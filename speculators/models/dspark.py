"""DSpark (arXiv 2607.05147): DFlash's backbone, a low-rank Markov head along the block, and a confidence head.

Parameter names are those of vllm/model_executor/models/qwen3_dspark.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.config import TrainConfig
from speculators.models.blocks import BlockConfig, BlockDrafter, BlockObjective
from speculators.models.drafter import Choice
from speculators.models.losses import Distributions
from speculators.models.verifier_head import VerifierHead

_CONFIDENCE_WEIGHT = 1.0


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """Shape of a DSpark drafter.

    Attributes:
        markov_rank: Width of the Markov head.
    """

    markov_rank: int = 256

    anchor_drafts: ClassVar[bool] = True

    def own_keys(self) -> dict[str, Any]:
        return {
            **super().own_keys(),
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }

    @classmethod
    def read_own_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if (kind := config.get("markov_head_type", "vanilla")) != "vanilla":
            raise ValueError(f"markov_head_type is {kind!r}; vLLM runs 'vanilla' only")
        for key in ("enable_confidence_head", "confidence_head_with_markov"):
            if not config.get(key, False):
                raise ValueError(
                    f"{key} is false; DSpark drafters here have a confidence head that reads the Markov head"
                )
        return {**super().read_own_keys(config), "markov_rank": config["markov_rank"]}


class MarkovHead(nn.Module):
    """Bias ``W2 W1[previous token]`` on a slot's logits."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Logit of the chance that the verifier accepts a slot's token, from its hidden state and the Markov embedding."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """[...] for hidden [..., H] and markov [..., r], in float32 as in vLLM."""
        return F.linear(torch.cat([hidden, markov], dim=-1).float(), self.proj.weight.float(), self.proj.bias.float())[
            ..., 0
        ]


class DSparkDrafter(BlockDrafter):
    """A block in one pass, then a walk along it: each slot's logits know the token chosen before."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)

    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
        """As DFlash; the Markov head adds nothing at first."""
        super().initialise(head, states)
        nn.init.normal_(self.markov_head.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.confidence_head.proj.weight)
        nn.init.zeros_(self.confidence_head.proj.bias)

    def choose(self, hidden: Tensor, anchor_token: int, kept_ids: Tensor | None, choice: Choice) -> list[int]:
        draft: list[int] = []
        for logits in self.lm_head(hidden):
            previous = draft[-1] if draft else anchor_token
            bias = self.markov_head.markov_w2(self.markov_head.markov_w1.weight[previous])
            draft.append(choice(logits + bias, kept_ids))
        return draft

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> DSparkObjective:
        return DSparkObjective(self, head, kept_ids, train, {"ce": 0.1, "tv": 0.9})


class DSparkObjective(BlockObjective):
    """DFlash's objective with the true token before each slot as the Markov head's input, and binary cross entropy of
    the confidence against the acceptance ``sum min(p, q)``."""

    drafter: DSparkDrafter

    def compare_rows(
        self, hidden: Tensor, last_states: Tensor, tokens: Tensor, next_tokens: Tensor, counted: Tensor
    ) -> tuple[Tensor, ...]:
        drafter = self.drafter
        markov = drafter.markov_head.markov_w1(tokens)  # all drafts of a target have the same true token before it
        logits = drafter.lm_head(hidden) + drafter.markov_head.markov_w2(markov)[:, None]
        pair = Distributions(logits, self.head.logits(last_states)[:, None])
        losses = torch.where(counted, pair.loss(self.loss), 0.0)
        confidence = drafter.confidence_head(hidden, markov[:, None].expand(*hidden.shape[:2], -1))
        accepted = pair.overlap.detach().clamp(0, 1).to(confidence.dtype)
        surprise = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        surprise = torch.where(counted, _CONFIDENCE_WEIGHT * surprise, 0.0).to(losses.dtype)
        return losses, logits.detach().argmax(dim=-1), surprise
