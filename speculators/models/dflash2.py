"""DFlash2: DFlash with short convolutions along the block, and a selector among the best candidates of each slot.

Parameter names and the computation are those of vllm/model_executor/models/qwen3_dflash2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.config import TrainConfig
from speculators.models.blocks import BlockConfig, BlockDrafter, BlockLayer, BlockObjective, Context
from speculators.models.drafter import Choice
from speculators.models.layers import RotaryEmbedding
from speculators.models.losses import Distributions
from speculators.models.verifier_head import VerifierHead

_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """Shape of a DFlash2 drafter.

    Attributes:
        conv_kernel_size: Slots that a convolution sees: its own and those before it.
        conv_group_size: Channels that share a token's own part of the kernel.
        selector_rank: Width of the selector's codebooks.
        selector_top_k: Candidates of a slot.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def own_keys(self) -> dict[str, Any]:
        return {**super().own_keys(), **{key: getattr(self, key) for key in _SELECTOR_KEYS}}

    @classmethod
    def read_own_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().read_own_keys(config), **{key: config[key] for key in _SELECTOR_KEYS}}


class GroupedConv(nn.Module):
    """Causal convolutions along the block, one before and one after a sublayer, with kernels that depend on the token.

    The kernel at a slot is a base kernel for each channel plus a part for each group of channels; one projection of the
    sublayer's input gives that part for both convolutions.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def initialise(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def around(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first convolution of x [B, A, n, H], and the token-dependent kernels of the second."""
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        return self.convolve(x, kernels[..., 0, :, :], 0), kernels[..., 1, :, :]

    def convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """x [B, A, n, H] convolved along n; kernels [B, A, n, taps, groups]."""
        blocks = x.unflatten(-1, (self.groups, -1))
        base = self.base_kernel[side].unflatten(-1, (self.groups, -1))
        output = torch.zeros_like(blocks)
        for tap in range(self.taps):
            moved = F.pad(blocks[:, :, : blocks.shape[2] - tap], (0, 0, 0, 0, tap, 0))
            output = output + (base[tap] + kernels[..., tap, :, None]) * moved
        return output.flatten(-2)


class DFlash2Layer(BlockLayer):
    """DFlash's layer with convolutions around attention and around the MLP."""

    def __init__(self, config: DFlash2Config, rotary: RotaryEmbedding) -> None:
        super().__init__(config, rotary)
        self.attention_conv = GroupedConv(config)
        self.mlp_conv = GroupedConv(config)

    def forward(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        inputs, kernels = self.attention_conv.around(self.input_layernorm(x))
        x = x + self.attention_conv.convolve(self.self_attn(inputs, positions, context), kernels, 1)
        inputs, kernels = self.mlp_conv.around(self.post_attention_layernorm(x))
        return x + self.mlp_conv.convolve(self.mlp(inputs), kernels, 1)


class CandidateSelector(nn.Module):
    """Adds ``<predecessor[previous token] * W h, successor[candidate]>`` to a candidate's logit."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def initialise(self) -> None:
        """Adds nothing at first."""
        nn.init.normal_(self.predecessor_codebook, std=1.0)
        nn.init.zeros_(self.successor_codebook)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Scores [..., k] to add, for hidden [..., H], previous tokens int64 [...] and candidates int64 [..., k]."""
        left = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        return (F.embedding(candidates, self.successor_codebook) @ left[..., None])[..., 0]


class DFlash2Drafter(BlockDrafter):
    """A block in one pass, then a walk along it that chooses among each slot's best candidates."""

    config: DFlash2Config
    layer_class: ClassVar[type[BlockLayer]] = DFlash2Layer
    full_vocabulary: ClassVar[bool] = True

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
        super().initialise(head, states)
        for module in self.modules():
            if isinstance(module, (GroupedConv, CandidateSelector)):
                module.initialise()

    def choose(self, hidden: Tensor, anchor_token: int, kept_ids: Tensor | None, choice: Choice) -> list[int]:
        scores, candidates = self.lm_head(hidden).topk(self.config.selector_top_k, dim=-1)
        draft: list[int] = []
        for state, score, candidate in zip(hidden, scores, candidates, strict=True):
            previous = torch.tensor(draft[-1] if draft else anchor_token, device=hidden.device)
            draft.append(choice(score + self.candidate_selector(state, previous, candidate), candidate))
        return draft

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> DFlash2Objective:
        return DFlash2Objective(self, head, kept_ids, train)


class DFlash2Objective(BlockObjective):
    """DFlash's objective, and the selector's cross entropy over its candidates, with the true token before each slot.

    A true token that is not among the candidates takes the place of the weakest one; such slots count as wrong.
    """

    drafter: DFlash2Drafter

    def compare_rows(
        self, hidden: Tensor, last_states: Tensor, tokens: Tensor, next_tokens: Tensor, counted: Tensor
    ) -> tuple[Tensor, ...]:
        logits = self.drafter.lm_head(hidden)
        pair = Distributions(logits, self.head.logits(last_states)[:, None])
        losses = torch.where(counted, pair.loss(self.loss), 0.0)
        candidates = logits.detach().topk(self.drafter.config.selector_top_k, dim=-1).indices
        truth = next_tokens[:, None].expand(candidates.shape[:2])
        is_true = candidates == truth[..., None]
        is_missing = ~is_true.any(dim=-1)
        candidates = candidates.clone()
        candidates[..., -1] = torch.where(is_missing, truth, candidates[..., -1])
        place = torch.where(is_missing, candidates.shape[-1] - 1, is_true.int().argmax(dim=-1))
        previous = tokens[:, None].expand(candidates.shape[:2])
        scores = logits.gather(-1, candidates) + self.drafter.candidate_selector(hidden, previous, candidates)
        wide = torch.promote_types(scores.dtype, torch.float32)
        surprise = -scores.to(wide).log_softmax(dim=-1).gather(-1, place[..., None])[..., 0]
        surprise = torch.where(counted, surprise, 0.0).to(losses.dtype)
        chosen = scores.detach().masked_fill(is_missing[..., None] & (candidates == truth[..., None]), float("-inf"))
        best = candidates.gather(-1, chosen.argmax(dim=-1, keepdim=True))[..., 0]
        return losses, best, surprise
