"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers, all K tokens of a draft in one pass.

Depth 0 is EAGLE-3's own input. Depth d > 0 of the draft at position t has a learned vector in place of the features
and a mask token's embedding in place of the next token's; it stands d positions further on. vLLM serves it as eagle3
with parallel drafting (vllm/v1/spec_decode/llm_base_proposer.py, ``set_inputs_first_pass``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.config import TrainConfig
from speculators.models.attention import StepKeys, document_mask, take
from speculators.models.autoregressive import (
    AutoregressiveObjective,
    AutoregressiveProposer,
    counted_positions,
    first_positions,
)
from speculators.models.batch import PackedBatch
from speculators.models.drafter import BEST, Choice, DraftSetting, Objective, batch_generator, shift
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter
from speculators.models.verifier_head import VerifierHead

# How many drafts of one depth go on to the next in training, and the least share that reaches any depth.
_KEPT_SHARE, _LEAST_SHARE = 0.7, 0.2


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Shape of a P-EAGLE drafter.

    Attributes:
        mask_token_id: Token whose embedding stands for a token that is not known yet.
        depths: Tokens K that it drafts in one pass.
    """

    norm_before_residual: bool = False
    mask_token_id: int
    depths: int

    default_num_layers: ClassVar[int] = 4

    @classmethod
    def own_fields(cls, setting: DraftSetting) -> dict[str, Any]:
        return {"mask_token_id": setting.mask_token_id, "depths": setting.num_speculative_tokens}

    def own_keys(self) -> dict[str, Any]:
        return {**super().own_keys(), "mask_token_id": self.mask_token_id}

    @classmethod
    def read_own_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().read_own_keys({"norm_before_residual": False, **config}),
            "mask_token_id": config["mask_token_id"],
            "depths": config["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
        }


class PEagleDrafter(Eagle3Drafter):
    """EAGLE-3's drafter and ``mask_hidden`` [1, 1, n_aux * H], what it reads where the verifier has not been yet."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.aux_layer_ids) * config.target_hidden_size))

    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
        super().initialise(head, states)
        nn.init.normal_(self.mask_hidden, std=0.02)

    def masked(self) -> tuple[Tensor, Tensor]:
        """Features [H] and embedding [H] of a position that is not known yet."""
        return self.fuse(self.mask_hidden[0, 0]), self.embed_tokens[self.config.mask_token_id]

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> Objective:
        decay = 1.0 if train.step_decay is None else train.step_decay
        weights = [decay**k for k in range(self.config.depths)]
        return PEagleObjective(self, head, kept_ids, weights, train.losses("kl_div"))

    def proposer(self, kept_ids: Tensor | None, num_speculative_tokens: int, choice: Choice = BEST) -> PEagleProposer:
        return PEagleProposer(self, kept_ids, num_speculative_tokens, choice)


class PEagleObjective(AutoregressiveObjective):
    """All depths in one pass. In training, each depth keeps a random share of the drafts of the one before (conditional
    drop of tokens, the paper's COD), so that memory does not grow with K; in validation all are kept.

    The draft at position t, depth d, sees depth 0 up to t in its document, and itself at depths 1 to d.
    """

    drafter: PEagleDrafter

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        counted = counted_positions(batch, self.steps)
        anchors = first_positions(counted.any(dim=0))
        if self.training:
            # Shuffled, so that the first ones are a random choice at every depth.
            order = torch.rand(anchors.shape, generator=batch_generator(batch)).argsort(dim=1).to(anchors.device)
            anchors = anchors.gather(1, order)
        width = anchors.shape[1]
        kept = [max(1, round(width * self._share(depth))) for depth in range(self.steps)]
        states = self._all_depths(batch, anchors, kept)
        counted = torch.stack([take(counts, anchors) for counts in counted])
        for depth, count in enumerate(kept):
            counted[depth, :, count:] = False
        padded = [F.pad(state, (0, 0, 0, width - state.shape[1])) for state in states]
        return self.compare_steps(batch, torch.stack(padded).flatten(1, 2), anchors, counted.flatten(1))

    def _share(self, depth: int) -> float:
        return max(_KEPT_SHARE**depth, _LEAST_SHARE) if self.training else 1.0

    def _all_depths(self, batch: PackedBatch, anchors: Tensor, kept: list[int]) -> list[Tensor]:
        """Hidden states of each depth [B, kept[depth], H] at the first anchors, ready for lm_head."""
        drafter = self.drafter
        mask = document_mask(batch.document_ids)
        asked_mask = take(mask[:, 0], anchors)[:, None]
        positions = take(batch.positions, anchors)
        features = drafter.fuse(batch.hidden_states[:, :, :-1].flatten(2))
        embeddings = F.embedding(shift(batch.token_ids, 1, 0), drafter.embed_tokens)
        masked, mask_embedding = drafter.masked()
        deeper = [masked.expand(len(anchors), count, -1) for count in kept[1:]]
        for layer in drafter.typed_layers:
            is_last = layer is drafter.typed_layers[-1]
            past = StepKeys()
            inputs, residual = layer.inputs(features, embeddings)
            if is_last:
                residual = take(residual, anchors)
                attended = layer.self_attn(inputs, batch.positions, past, asked_mask, anchors)
            else:
                attended = layer.self_attn(inputs, batch.positions, past, mask)
            features = layer.after_attention(attended, residual)
            for depth, state in enumerate(deeper, 1):
                count = state.shape[1]
                inputs, residual = layer.inputs(state, mask_embedding.expand_as(state))
                attended = layer.self_attn(inputs, positions[:, :count] + depth, past, asked_mask[:, :, :count])
                deeper[depth - 1] = layer.after_attention(attended, residual)
        return [drafter.norm(state) for state in (features, *deeper)]


class PEagleProposer(AutoregressiveProposer):
    """Drafts K tokens in one pass."""

    drafter: PEagleDrafter

    def propose(self, states: Tensor, shifted: Sequence[int]) -> list[int]:
        """See :class:`~speculators.models.drafter.Proposer`."""
        unknown = self.num_speculative_tokens - 1
        features = self.drafter.fuse(states.flatten(1))
        masked, _ = self.drafter.masked()
        features = torch.cat([features, masked.expand(unknown, -1)])
        tokens = [*shifted, *[self.drafter.config.mask_token_id] * unknown]
        hidden, _ = self.decode(features, tokens, self.length)
        self.length += len(shifted)
        self.cache.truncate(self.length)
        return [self.choose(state) for state in hidden[len(shifted) - 1 :]]
