"""The batch that every drafting method trains on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Samples packed into B rows of S positions; several samples share a row, none crosses rows.

    Attributes:
        token_ids: int64 [B, S].
        hidden_states: [B, S, n_layers, H]: the auxiliary layers, then the verifier's last layer before its final norm.
            Zero at a sample's last token, and the last layer's where it would predict a token without a loss.
        loss_mask: bool [B, S], True on the tokens that the verifier generated.
        document_ids: int64 [B, S]: which sample of the row a position belongs to; -1 is padding.
        positions: int64 [B, S], from 0 in each document.
    """

    token_ids: Tensor
    hidden_states: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    positions: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PackedBatch:
        """The batch on a device, with its hidden states in ``dtype``."""
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            hidden_states=self.hidden_states.to(device, dtype or self.hidden_states.dtype, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
        )
