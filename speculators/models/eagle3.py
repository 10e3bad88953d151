"""EAGLE-3 (arXiv 2503.01840): an autoregressive drafter fed with hidden states of several verifier layers.

Parameter names are those that vLLM's loader expects (vllm/model_executor/models/llama_eagle3.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speculators.config import TrainConfig
from speculators.models.attention import DraftAttention, KeyValueCache, StepKeys, document_mask, take
from speculators.models.batch import PackedBatch
from speculators.models.layers import GatedMLP, RMSNorm, RotaryEmbedding
from speculators.models.losses import head_divergence
from speculators.models.verifier_head import VerifierHead
from speculators.verifier import Verifier

# Above this many logits (positions x draft vocabulary) the loss is computed in chunks that are recomputed in backward.
_MAX_LOGITS = 1 << 26


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 drafter.

    Attributes:
        num_layers: Draft layers.
        vocab_size: The verifier's vocabulary.
        draft_vocab_size: Tokens that the drafter can propose.
        rope_parameters: As in transformers: ``rope_type``, ``rope_theta`` and the type's own keys.
        target_hidden_size: Width of the verifier's hidden states.
        aux_layer_ids: Verifier layers that feed the drafter.
        norm_before_residual: The first layer's residual is the normed features instead of the features.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    norm_before_residual: bool = True

    @classmethod
    def for_verifier(
        cls, verifier: Verifier, train: TrainConfig, aux_layer_ids: list[int], draft_vocab_size: int
    ) -> Eagle3Config:
        """A drafter whose layers have the shape of the verifier's own."""
        text = verifier.config
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        return cls(
            hidden_size=hidden,
            intermediate_size=int(text.get("intermediate_size") or 4 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            num_layers=train.num_layers,
            vocab_size=verifier.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope_parameters=rope_parameters(text),
            max_position_embeddings=int(text.get("max_position_embeddings", 4096)),
            target_hidden_size=hidden,
            aux_layer_ids=tuple(aux_layer_ids),
        )


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a config.json, whether written by transformers 5 (``rope_parameters``) or before."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in parameters and "rope_type" not in parameters:
        parameters["rope_type"] = parameters.pop("type")
    parameters.setdefault("rope_type", "default")
    parameters.setdefault("rope_theta", float(config.get("rope_theta", 10000.0)))
    return parameters


class Eagle3Layer(nn.Module):
    """One draft layer; the first takes embedding and features side by side, the others their predecessor's output."""

    def __init__(self, config: Eagle3Config, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.is_first, self.norm_before_residual = index == 0, config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(
            2 * hidden if self.is_first else hidden,
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rotary,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size)

    def inputs(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual."""
        if not self.is_first:
            return self.input_layernorm(features), features
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        return torch.cat([self.input_layernorm(embeddings), normed], dim=-1), residual

    def after_attention(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Residual, norm, MLP, residual."""
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(nn.Module):
    """The drafter.

    At position t it reads the features of position t and the embedding of token t+1, and predicts token t+2.
    ``embed_tokens`` is the verifier's, frozen, and not part of the checkpoint: vLLM shares the verifier's.
    """

    embed_tokens: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)
        self.rotary = rotary
        self.fc = nn.Linear(len(config.aux_layer_ids) * config.target_hidden_size, hidden, bias=False)
        layers = [Eagle3Layer(config, index, rotary) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self._typed_layers = tuple(layers)  # the same modules, whose class ModuleList forgets
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_tokens", torch.zeros(config.vocab_size, hidden), persistent=False)

    def initialise(self, head: VerifierHead) -> None:
        """Start from what the verifier knows.

        lm_head and final norm are the verifier's own. ``fc`` passes the last auxiliary layer through and the layers add
        nothing at first, so that training starts from features that the verifier's head already understands; measured
        on SmolLM2-135M, this reached after one epoch what a random start reached after two.
        """
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
            for layer in self._typed_layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()

    def fuse(self, aux: Tensor) -> Tensor:
        """Features [..., H] from the auxiliary layers' states, side by side: [..., n_aux * H]."""
        return self.fc(aux)

    def step(
        self,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        past: list[StepKeys],
        mask: Tensor,
        queried: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One training-time-test step over packed documents.

        Args:
            features: [B, S, H]: fused features at step 0, then what the step before returned.
            token_ids: int64 [B, S], one token further on than the features' last one.
            positions: int64 [B, S], RoPE positions.
            past: One entry a layer; this step's keys and values are added.
            mask: bool [B, 1, S, S] from :func:`document_mask`.
            queried: int64 [B, Q], at step 0: the positions whose output is needed. Later steps have only these: Q takes
                the place of S in all arguments but the mask's last dimension.

        Returns:
            The hidden states for :meth:`logits` [B, Q, H], and the features of the next step [B, Q, H].
        """
        embeddings = F.embedding(token_ids, self.embed_tokens)
        for layer, keys in zip(self._typed_layers, past, strict=True):
            # Only keys and values are needed of the other positions, but the next layer's come from this one's output.
            asked = queried if layer is self._typed_layers[-1] else None
            inputs, residual = layer.inputs(features, embeddings)
            allowed = mask
            if asked is not None:
                residual, allowed = take(residual, asked), take(mask[:, 0], asked)[:, None]
            features = layer.after_attention(layer.self_attn(inputs, positions, keys, allowed, asked), residual)
        return self.norm(features), features

    def decode(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, cache: Eagle3Cache
    ) -> tuple[Tensor, Tensor]:
        """Draft with a KV cache, as in serving; shapes as in :meth:`step` with B = 1."""
        embeddings = F.embedding(token_ids, self.embed_tokens)
        for layer, kept in zip(self._typed_layers, cache.layers, strict=True):
            inputs, residual = layer.inputs(features, embeddings)
            features = layer.after_attention(layer.self_attn.decode(inputs, positions, kept), residual)
        return self.norm(features), features

    def new_cache(self) -> Eagle3Cache:
        """An empty cache for :meth:`decode`."""
        return Eagle3Cache([KeyValueCache() for _ in self.layers])

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., draft_vocab_size]."""
        return self.lm_head(hidden)


@dataclass
class Eagle3Cache:
    """KV caches of all draft layers."""

    layers: list[KeyValueCache]

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens in every layer."""
        for layer in self.layers:
            layer.truncate(length)


class Eagle3Objective(nn.Module):
    """Training-time test: unroll the drafter K steps and compare each with the verifier.

    At step k, position t holds the drafter's own features of step k-1 (step 0: the verifier's), the embedding of the
    true token t+1+k, RoPE position t+k, and is compared with the verifier's distribution over token t+2+k. It counts
    where that token exists in the same document and was generated by the verifier.

    Args:
        drafter: What is trained.
        head: The verifier's head, at the draft vocabulary.
        kept_ids: int64 [Vd], verifier ids of the draft vocabulary; None when it is the whole one.
        steps: K.
    """

    kept_ids: Tensor | None

    def __init__(self, drafter: Eagle3Drafter, head: VerifierHead, kept_ids: Tensor | None, steps: int) -> None:
        super().__init__()
        self.drafter = drafter
        self._head = (head,)  # in a tuple: frozen, so not a submodule that DDP would broadcast
        self.register_buffer("kept_ids", kept_ids, persistent=False)
        self.steps = steps

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Unroll over a batch.

        Returns:
            Loss sums [K] (KL in nats, with gradient), and float64 sums [5, K] without gradient: loss; positions with a
            loss; those where the drafter's best token is the true one; those where all earlier steps were right; those
            of them that are right as well.
        """
        counted = torch.stack([self._counted(batch, k) for k in range(self.steps)])  # [K, B, S]
        wanted = counted.any(dim=0)
        states = self._unroll(batch, _positions(wanted))
        losses, best = self._compare(states, batch, counted, wanted)
        truth = torch.stack([_shift(batch.token_ids, 2 + k, 0) for k in range(self.steps)])
        correct = counted & (best == truth)
        right = correct.cumprod(dim=0).bool()
        eligible = counted.clone()
        eligible[1:] &= right[:-1]
        numbers = [x.sum(dim=(1, 2)).double() for x in (counted, correct, eligible, right)]
        return losses, torch.stack([losses.detach().double(), *numbers])

    def _counted(self, batch: PackedBatch, k: int) -> Tensor:
        """bool [B, S]: positions with a loss at step k."""
        same = _shift(batch.document_ids, 2 + k, -1) == batch.document_ids
        return _shift(batch.loss_mask, 2 + k, False) & same

    def _unroll(self, batch: PackedBatch, queried: Tensor) -> list[Tensor]:
        """Each step's hidden states [B, Q, H] at the queried positions, ready for the drafter's lm_head."""
        drafter = self.drafter
        mask = document_mask(batch.document_ids)
        past = [StepKeys() for _ in drafter.layers]
        features = drafter.fuse(batch.hidden_states[:, :, :-1].flatten(2))
        tokens = _shift(batch.token_ids, 1, 0)
        hidden, features = drafter.step(features, tokens, batch.positions, past, mask, queried)
        states = [hidden]
        mask, positions = take(mask[:, 0], queried)[:, None], take(batch.positions, queried)
        for k in range(1, self.steps):
            tokens = take(_shift(batch.token_ids, 1 + k, 0), queried)
            hidden, features = drafter.step(features, tokens, positions + k, past, mask)
            states.append(hidden)
        return states

    def _compare(
        self, states: list[Tensor], batch: PackedBatch, counted: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Summed divergences [K], and the drafter's best tokens (verifier ids) at all positions, int64 [K, B, S].

        A row stands for a position u whose distribution is a target at any step; at step k the drafter's position
        u - 1 - k is compared with it. So the verifier's distribution is computed once for all steps.

        Args:
            states: Each step's hidden states [B, Q, H] at the wanted positions.
            counted: bool [K, B, S], positions with a loss.
            wanted: bool [B, S], positions with a loss at any step.
        """
        device, width = wanted.device, states[0].shape[1]
        targets = torch.stack([_shift_right(counts, 1 + k) for k, counts in enumerate(counted)]).any(dim=0)
        rows = targets.flatten().nonzero()[:, 0]  # [n], as positions of the flattened batch
        anchors = rows - 1 - torch.arange(self.steps, device=device)[:, None]
        exists = anchors >= 0
        anchors = anchors.clamp(min=0)
        valid = counted.flatten(1).gather(1, anchors) & exists
        slots = (wanted.cumsum(dim=1) - 1).clamp(min=0) + width * torch.arange(len(wanted), device=device)[:, None]
        places = slots.flatten()[anchors]
        hidden = torch.stack([state.flatten(0, 1)[at] for state, at in zip(states, places, strict=True)])
        last = batch.hidden_states[:, :, -1].flatten(0, 1)[rows]

        size = max(1, _MAX_LOGITS // (self.steps * self.drafter.config.draft_vocab_size))
        losses, chosen = hidden.new_zeros(self.steps), []
        for part in torch.arange(len(rows), device=device).split(size):
            arguments = hidden[:, part], last[part], valid[:, part]
            if len(rows) > size and torch.is_grad_enabled():
                sums, best = checkpoint(self._compare_chunk, *arguments, use_reentrant=False)
            else:
                sums, best = self._compare_chunk(*arguments)
            losses = losses + sums
            chosen.append(best)
        best = torch.cat(chosen, dim=1)
        if self.kept_ids is not None:
            best = self.kept_ids[best]
        everywhere = torch.zeros(self.steps, batch.token_ids.numel(), dtype=torch.int64, device=device)
        everywhere[valid.nonzero()[:, 0], anchors[valid]] = best[valid]
        return losses, everywhere.view_as(counted)

    def _compare_chunk(self, hidden: Tensor, last: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        return head_divergence(hidden, self.drafter.lm_head.weight, self._head[0].logits(last), valid)


def _positions(wanted: Tensor) -> Tensor:
    """int64 [B, Q]: the wanted positions of each row in order, then as many others as the fullest row has more."""
    width = max(1, int(wanted.sum(dim=1).max()))
    return (~wanted).int().argsort(dim=1, stable=True)[:, :width]


def _shift(x: Tensor, by: int, fill: int | bool) -> Tensor:
    """x[:, t + by] at t, ``fill`` past the end."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])), value=fill)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """bool x[:, t - by] at t, False before the start."""
    return F.pad(x, (by, 0))[:, : x.shape[1]]
