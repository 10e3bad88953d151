"""DFlash (arXiv 2602.06036): block diffusion, a whole block of tokens filled in by one pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from speculators.config import TrainConfig
from speculators.models.blocks import BlockConfig, BlockDrafter, BlockObjective
from speculators.models.verifier_head import VerifierHead


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """Shape of a DFlash drafter."""


class DFlashDrafter(BlockDrafter):
    """The block drafter as it is."""

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> BlockObjective:
        return BlockObjective(self, head, kept_ids, train)
