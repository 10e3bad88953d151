"""The drafting methods by name."""

from __future__ import annotations

from dataclasses import dataclass

from speculators.models.dflash import DFlashConfig, DFlashDrafter
from speculators.models.dflash2 import DFlash2Config, DFlash2Drafter
from speculators.models.drafter import Drafter, DrafterConfig
from speculators.models.dspark import DSparkConfig, DSparkDrafter
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.peagle import PEagleConfig, PEagleDrafter


@dataclass(frozen=True)
class Method:
    """A drafting method: the classes that make it.

    Attributes:
        architecture: ``architectures`` entry of a drafter's config.json.
    """

    config: type[DrafterConfig]
    drafter: type[Drafter]
    architecture: str

    @property
    def has_mask_token(self) -> bool:
        """Whether it reads a token that stands for "not known yet"."""
        return "mask_token_id" in self.config.__dataclass_fields__


METHODS: dict[str, Method] = {
    "eagle3": Method(Eagle3Config, Eagle3Drafter, "Eagle3DraftModel"),
    "peagle": Method(PEagleConfig, PEagleDrafter, "PEagleDraftModel"),
    "dflash": Method(DFlashConfig, DFlashDrafter, "DFlashDraftModel"),
    "dflash2": Method(DFlash2Config, DFlash2Drafter, "DFlash2DraftModel"),
    "dspark": Method(DSparkConfig, DSparkDrafter, "Qwen3DSparkModel"),
    "mtp": Method(MtpConfig, MtpDrafter, "MTPDraftModel"),
}
