"""What DFlash, DFlash2 and DSpark share: blocks of draft positions behind anchors, which read the verifier's context.

Parameter names and the computation are those of vllm/model_executor/models/qwen3_dflash.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.config import LossName, TrainConfig
from speculators.models.attention import in_parts, rows_at_once, take
from speculators.models.batch import PackedBatch
from speculators.models.drafter import (
    BEST,
    Choice,
    Drafter,
    DrafterConfig,
    DraftSetting,
    Objective,
    batch_generator,
    tally,
)
from speculators.models.layers import GatedMLP, RMSNorm, RotaryEmbedding, rotate
from speculators.models.verifier_head import VerifierHead

# D-PACE: how much of a slot's weight does not depend on the slots before it.
_DPACE_SMOOTHING = 0.5
# Decay of the weights within a block, in slots.
_BLOCK_GAMMA = 4.0
# How heads start out, see look_back: how far they look at most, by how many of RoPE's pairs, how sharply, with how much
# noise beside it, and how much of what they find they copy.
_LOOK_BACK_DISTANCES, _LOOK_BACK_PAIRS, _LOOK_BACK_SHARPNESS, _LOOK_BACK_NOISE = 4, 8, 20.0, 0.005
_COPIED_SHARE = 0.2
_SAMPLED_EMBEDDINGS = 16384


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DrafterConfig):
    """Shape of a drafter that drafts in blocks.

    Attributes:
        block_size: Slots of a block; slot 0 holds the anchor's token, the others the mask token.
        mask_token_id: Token whose embedding stands for a token that is not known yet.
        sample_from_anchor: Slot j predicts the token after its own position, so slot 0 drafts too; else slot j
            predicts the token at its own position, and slot 0 drafts nothing.
        sliding_window: Positions that a slot sees, counted back from its own; None: all. In all layers, because mixed
            ones need vLLM's V2 model runner.
    """

    layer_type: str = "qwen3"
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    sliding_window: int | None = None

    aux_key: ClassVar[str] = "aux_hidden_state_layer_ids"
    default_num_layers: ClassVar[int] = 5
    anchor_drafts: ClassVar[bool] = False
    """``sample_from_anchor`` of new drafters."""

    @property
    def drafts(self) -> int:
        """Tokens K that a block drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def own_fields(cls, setting: DraftSetting) -> dict[str, Any]:
        return {
            "block_size": setting.num_speculative_tokens + (0 if cls.anchor_drafts else 1),
            "mask_token_id": setting.mask_token_id,
            "sample_from_anchor": cls.anchor_drafts,
            "sliding_window": setting.train.sliding_window,
        }

    def layer_keys(self) -> dict[str, Any]:
        if self.sliding_window is None:
            return {}
        return {
            "layer_types": ["sliding_attention"] * self.num_layers,
            "use_sliding_window": True,  # transformers ignores the window without it
            "sliding_window": self.sliding_window,
            "is_causal": False,  # vLLM's DSpark would take slots of windowed layers for causal
        }

    def own_keys(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": self.sample_from_anchor,
            "sliding_window_non_causal": True,
        }

    @classmethod
    def read_own_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if not config.get("sliding_window_non_causal", True):
            raise ValueError("sliding_window_non_causal is false; drafters here see their whole block")
        layer = config["transformer_layer_config"]
        kinds = set(layer.get("layer_types") or ["full_attention"])
        window = layer.get("sliding_window") if kinds == {"sliding_attention"} else None
        if kinds not in ({"full_attention"}, {"sliding_attention"}):
            raise ValueError(f"layer_types is {layer['layer_types']}; all must be the same kind of attention")
        if kinds == {"sliding_attention"} and (type(window) is not int or window < config["block_size"]):
            raise ValueError(f"sliding_window is {window!r}; it must be a number, at least block_size")
        return {
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": bool(config.get("sample_from_anchor", False)),
            "sliding_window": window,
        }


@dataclass(frozen=True)
class Context:
    """What blocks read of the verifier.

    Attributes:
        states: [B, S, H], fused and normed.
        positions: int64 [B, S].
        visible: bool [B, A, S]: which positions each anchor's block sees.
    """

    states: Tensor
    positions: Tensor
    visible: Tensor


def attend_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor, visible: Tensor
) -> Tensor:
    """Attention of A blocks of n slots over the context and over their own slots: [B, heads, A, n, head_dim].

    Args:
        queries: [B, heads, A, n, head_dim], scaled; keys and values likewise.
        context_keys: [B, heads, S, head_dim]; context_values likewise.
        visible: bool [B, 1, A, 1 or n, S].
    """
    blocks = queries.shape[2:4]
    seen = (queries.flatten(2, 3) @ context_keys.transpose(-1, -2)).unflatten(2, blocks)
    seen = seen.masked_fill(~visible, float("-inf"))
    weights = torch.cat([seen, queries @ keys.transpose(-1, -2)], dim=-1).softmax(dim=-1)
    from_context, from_block = weights.split([context_keys.shape[2], blocks[1]], dim=-1)
    return (from_context.flatten(2, 3) @ context_values).unflatten(2, blocks) + from_block @ values


class BlockAttention(nn.Module):
    """Slots attend to the verifier's context and to all slots of their own block."""

    def __init__(self, config: BlockConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.repeats = head_dim, config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.sliding_window = config.sliding_window
        self._rotary = (rotary,)  # in a tuple: shared by all layers, and no submodule of any of them

    @property
    def frequencies(self) -> Tensor:
        """RoPE's turns per position [head_dim / 2], in radians."""
        return self._rotary[0].frequencies

    def forward(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Attention of A blocks of n slots.

        Args:
            x: [B, A, n, H].
            positions: int64 [B, A, n].
        """
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), *self._rotary[0](positions, x.dtype))
        keys, values = self._keys_values(x, positions)
        context_keys, context_values = self._keys_values(context.states, context.positions)
        queries = queries.permute(0, 3, 1, 2, 4) / math.sqrt(self.head_dim)  # [B, heads, A, n, head_dim]
        keys, values = (t.permute(0, 3, 1, 2, 4) for t in (keys, values))
        context_keys, context_values = (t.permute(0, 2, 1, 3) for t in (context_keys, context_values))
        visible = context.visible[:, :, None]
        if self.sliding_window is not None:
            oldest = positions[..., None] - self.sliding_window
            visible = visible & (context.positions[:, None, None] > oldest)
        mixed = in_parts(
            lambda q, k, v, seen: attend_blocks(q, k, v, context_keys, context_values, seen),
            rows_at_once(queries[:, :, 0], positions.shape[2] * context_keys.shape[2]),
            *(queries, keys, values, visible[:, None]),
        )
        return self.o_proj(mixed.permute(0, 2, 3, 1, 4).flatten(3))

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), *self._rotary[0](positions, x.dtype))
        values = self._heads(self.v_proj(x))
        return keys.repeat_interleave(self.repeats, dim=-2), values.repeat_interleave(self.repeats, dim=-2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class BlockLayer(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, config: BlockConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        """x [B, A, n, H] after the layer."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context)
        return x + self.mlp(self.post_attention_layernorm(x))


def common_direction(embeddings: Tensor, states: Tensor | None) -> Tensor:
    """A direction m [H] that all inputs of the layers share: ``x.m`` is 1 on average for x of root mean square 1.

    Embeddings as well as hidden states of language models have a large common part (a cosine of 0.7 with their mean in
    SmolLM2-135M).

    Args:
        embeddings: [V, H].
        states: [n, H], fused auxiliary states; None: embeddings alone decide.
    """
    means = [_scaled(x).mean(dim=0) for x in (embeddings, states) if x is not None]
    stacked = torch.stack(means)
    return torch.linalg.lstsq(stacked, stacked.new_ones(len(means), 1)).solution[:, 0]


def main_directions(embeddings: Tensor) -> Tensor:
    """The directions in which embeddings [V, H] differ, the most important first: orthonormal rows [H, H]."""
    sampled = _scaled(embeddings[:: max(1, len(embeddings) // _SAMPLED_EMBEDDINGS)])
    centred = sampled - sampled.mean(dim=0)
    return torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1).T


def look_back(attention: BlockAttention, direction: Tensor, basis: Tensor) -> None:
    """Let each head attend to the position a fixed number of tokens back, and copy a part of what is there.

    Queries and keys start out the same for every input, because they read only what all inputs have in common. So their
    product depends on RoPE's rotation alone: with the query rotated back by d positions, it is largest at distance d.

    Args:
        attention: Whose weights to set.
        direction: [H], from :func:`common_direction`.
        basis: [kv_heads * head_dim, H]: the directions that the heads copy, orthonormal.
    """
    dim, heads, kv_heads = attention.head_dim, attention.q_proj.out_features, attention.k_proj.out_features
    heads, kv_heads = heads // dim, kv_heads // dim
    pairs = min(_LOOK_BACK_PAIRS, dim // 2)  # the fastest rotations: they tell neighbours apart
    turns = attention.frequencies[:pairs].to(direction.device, direction.dtype)
    for projection in (attention.q_proj, attention.k_proj):
        nn.init.normal_(projection.weight, std=_LOOK_BACK_NOISE)
    key = direction.new_zeros(kv_heads, dim)
    key[:, :pairs] = 1
    attention.k_proj.weight += 2 * key.flatten()[:, None] * direction
    query = direction.new_zeros(heads, dim)
    for head in range(heads):
        distance = 1 + head % _LOOK_BACK_DISTANCES
        query[head, :pairs] = (turns * distance).cos()
        query[head, dim // 2 : dim // 2 + pairs] = -(turns * distance).sin()
    attention.q_proj.weight += 2 * query.flatten()[:, None] * direction
    for norm in (attention.q_norm, attention.k_norm):  # the largest score is sharpness
        norm.weight.fill_(math.sqrt(_LOOK_BACK_SHARPNESS / math.sqrt(dim)))
    # Every head gets important directions and less important ones.
    spread = torch.arange(len(basis), device=basis.device).view(dim, kv_heads).T.flatten()
    attention.v_proj.weight.copy_(basis[spread])
    parts = basis[spread].view(kv_heads, dim, -1).repeat_interleave(attention.repeats, dim=0) / attention.repeats
    attention.o_proj.weight.copy_(_COPIED_SHARE * parts.flatten(0, 1).T)


def _scaled(x: Tensor) -> Tensor:
    """Each row with root mean square 1."""
    return x / x.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-6)


class BlockDrafter(Drafter):
    """Drafts a block in one pass: slot 0 is the last token there is, the other slots are masks to be filled in."""

    config: BlockConfig
    layer_class: ClassVar[type[BlockLayer]] = BlockLayer

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        rotary = RotaryEmbedding(config.head_dim, config.rope_parameters)
        self.fc = nn.Linear(len(config.aux_layer_ids) * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(self.layer_class(config, rotary) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(not self.shares_lm_head)
        self.register_buffer("embed_tokens", torch.zeros(config.vocab_size, hidden), persistent=False)

    @property
    def shares_lm_head(self) -> bool:
        return self.config.draft_vocab_size == self.config.vocab_size

    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
        """Start from what the verifier knows, with attention that already looks where the answers are.

        lm_head and final norm are the verifier's; ``fc`` passes the last auxiliary layer through; each attention head
        looks a fixed number of tokens back and copies a part of what it finds (see :func:`look_back`); the MLPs add
        nothing at first.

        A mask slot knows nothing by itself: it has to find the anchor's token and the last states among all keys. Left
        to small random numbers, that takes longer to learn than all else: on SmolLM2-135M (DFlash, 2 layers, one epoch
        of 86k tokens) validation predicted an acceptance length of 1.11; with layers copied from the verifier 1.12;
        with heads that look back 1.16, and 1.25 when they copy as well."""
        hidden, wide = self.config.hidden_size, self.config.target_hidden_size
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
            self.embed_tokens.copy_(head.embed_tokens)
            self.lm_head.weight.copy_(head.lm_head)
            self.norm.weight.copy_(head.norm_weight)
            if hidden == wide:
                self.fc.weight.zero_()
                self.fc.weight[:, -wide:].copy_(torch.eye(hidden))
            direction = common_direction(head.embed_tokens, None if states is None else self.fc(states))
            basis = main_directions(head.embed_tokens)
            size = self.config.num_key_value_heads * self.config.head_dim
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, BlockLayer)
                rows = torch.arange(index * size, (index + 1) * size, device=basis.device) % hidden
                look_back(layer.self_attn, direction, basis[rows])
                layer.mlp.down_proj.weight.zero_()

    def context(self, aux: Tensor) -> Tensor:
        """What the layers read of auxiliary states [..., n_aux * H]: [..., H]."""
        return self.hidden_norm(self.fc(aux))

    def forward(self, anchor_tokens: Tensor, anchor_positions: Tensor, context: Context) -> Tensor:
        """Hidden states of the slots that draft, ready for lm_head.

        Args:
            anchor_tokens: int64 [B, A].
            anchor_positions: int64 [B, A].

        Returns:
            [B, A, K, H].
        """
        size = self.config.block_size
        tokens = torch.full((*anchor_tokens.shape, size), self.config.mask_token_id, device=anchor_tokens.device)
        tokens[..., 0] = anchor_tokens
        positions = anchor_positions[..., None] + torch.arange(size, device=tokens.device)
        x = F.embedding(tokens, self.embed_tokens)
        for layer in self.layers:
            x = layer(x, positions, context)
        return self.norm(x[:, :, size - self.config.drafts :])

    def choose(self, hidden: Tensor, anchor_token: int, kept_ids: Tensor | None, choice: Choice) -> list[int]:
        """The draft (verifier ids) from the hidden states [K, H] of one block."""
        return [choice(logits, kept_ids) for logits in self.lm_head(hidden)]

    def proposer(self, kept_ids: Tensor | None, num_speculative_tokens: int, choice: Choice = BEST) -> BlockProposer:
        return BlockProposer(self, kept_ids, num_speculative_tokens, choice)


class BlockObjective(Objective):
    """Blocks behind anchors: generated tokens, as many as ``train.max_anchors`` of a batch, drawn at random.

    A block sees the verifier's states before its anchor, in its document, and itself. Draft k of the block at anchor a
    is compared with the verifier's distribution over token a+1+k, and counts where that token is in the same document
    and was generated.
    """

    drafter: BlockDrafter

    def __init__(
        self,
        drafter: BlockDrafter,
        head: VerifierHead,
        kept_ids: Tensor | None,
        train: TrainConfig,
        default_loss: LossName | Mapping[LossName, float] = "kl_div",
    ) -> None:
        decay = math.exp(-1 / _BLOCK_GAMMA) if train.step_decay is None else train.step_decay
        weights = [decay**k for k in range(drafter.config.drafts)]
        super().__init__(drafter, head, kept_ids, weights, train.losses(default_loss))
        self.max_anchors = train.max_anchors
        self.is_paced = train.position_weights == "d_pace"
        if self.is_paced:
            self.weights.fill_(1.0)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        anchors, is_anchor = self._anchors(batch)
        rows, size = batch.token_ids.shape
        flat = anchors + size * torch.arange(rows, device=anchors.device)[:, None]
        tokens, documents, positions = (
            x.flatten()[flat] for x in (batch.token_ids, batch.document_ids, batch.positions)
        )
        before = torch.arange(size, device=anchors.device) < anchors[..., None]
        visible = before & (batch.document_ids[:, None] == documents[..., None])
        states = self.drafter.context(batch.hidden_states[:, :, :-1].flatten(2))
        hidden = self.drafter(tokens, positions, Context(states, batch.positions, visible))

        steps = torch.arange(self.steps, device=anchors.device)[:, None, None]
        targets = flat + steps
        predicted = anchors + 1 + steps
        exists = predicted < size
        at = (flat + 1 + steps).clamp(max=batch.token_ids.numel() - 1)
        same = batch.document_ids.flatten()[at] == documents
        counted = exists & same & batch.loss_mask.flatten()[at] & is_anchor
        targets = torch.where(counted, targets, 0)
        flattened = [x.flatten(1) for x in (targets, counted)]
        losses, best, *more = self.compare(batch, hidden.flatten(0, 1).transpose(0, 1), *flattened)
        correct = best == batch.token_ids.flatten()[at].flatten(1)
        if self.is_paced:
            losses = losses * pace(losses.detach())
        sums = losses.sum(dim=1)
        for extra in more:
            sums = sums + extra.sum(dim=1)
        return sums, tally(sums, flattened[1], correct)

    def _anchors(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Positions int64 [B, A] of the anchors in their rows, in order, and which of them are real, bool [B, A]."""
        wanted = batch.loss_mask & (batch.document_ids >= 0)
        number = int(wanted.sum())
        if self.training and number > self.max_anchors:
            chosen = torch.randperm(number, generator=batch_generator(batch))[: self.max_anchors]
            places = wanted.flatten().nonzero()[:, 0][chosen.to(wanted.device)]
            wanted = torch.zeros_like(wanted).flatten().index_fill(0, places, True).view_as(wanted)
        width = max(1, int(wanted.sum(dim=1).max()))
        anchors = (~wanted).int().argsort(dim=1, stable=True)[:, :width]
        return anchors, take(wanted, anchors)


def pace(losses: Tensor) -> Tensor:
    """D-PACE's weights of draft positions [K, A] from their cross entropies [K, A].

    A slot matters as far as the slots before it are likely to be right: the product of their smoothed confidences
    ``s + (1 - s) exp(-loss)``.
    """
    smoothed = _DPACE_SMOOTHING + (1 - _DPACE_SMOOTHING) * (-losses).exp()
    return torch.cat([torch.ones_like(losses[:1]), smoothed[:-1].cumprod(dim=0)])


class BlockProposer:
    """Drafts a block behind the last token, with the verifier's states of all positions before it as context
    (vllm/v1/spec_decode/dflash.py)."""

    def __init__(
        self, drafter: BlockDrafter, kept_ids: Tensor | None, num_speculative_tokens: int, choice: Choice = BEST
    ) -> None:
        self.drafter, self.choice = drafter, choice
        self.device = drafter.lm_head.weight.device
        self.kept_ids = None if kept_ids is None else kept_ids.to(self.device)
        self.num_speculative_tokens = num_speculative_tokens
        self.states = torch.zeros(0, drafter.config.hidden_size, device=self.device)
        self.length = 0

    def propose(self, states: Tensor, shifted: Sequence[int]) -> list[int]:
        """See :class:`~speculators.models.drafter.Proposer`."""
        self.states = torch.cat([self.states, self.drafter.context(states.flatten(1))])
        self.length += len(shifted)
        positions = torch.arange(self.length, device=self.device)[None]
        visible = torch.ones(1, 1, self.length, dtype=torch.bool, device=self.device)
        anchor = torch.tensor([[shifted[-1]]], device=self.device)
        place = torch.tensor([[self.length]], device=self.device)
        hidden = self.drafter(anchor, place, Context(self.states[None], positions, visible))
        wanted = hidden[0, 0, : self.num_speculative_tokens]
        return self.drafter.choose(wanted, shifted[-1], self.kept_ids, self.choice)
