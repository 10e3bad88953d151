"""EAGLE-3 (arXiv 2503.01840): an autoregressive drafter fed with hidden states of several verifier layers.

Parameter names are those that vLLM's loader expects (vllm/model_executor/models/llama_eagle3.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.config import TrainConfig
from speculators.models.attention import DraftAttention, KeyValueCache, StepKeys, document_mask, take
from speculators.models.batch import PackedBatch
from speculators.models.drafter import Drafter, DrafterConfig, Objective, shift, tally
from speculators.models.layers import GatedMLP, RMSNorm, RotaryEmbedding
from speculators.models.verifier_head import VerifierHead


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """Shape of an EAGLE-3 drafter.

    Attributes:
        norm_before_residual: The first layer's residual is the normed features instead of the features.
        norm_before_fc: One norm over the auxiliary states side by side, before ``fc``.
        fc_norm: A norm for each auxiliary state, before ``fc``.
        norm_output: The next step's features are the output after the final norm instead of before it.
    """

    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def own_keys(self) -> dict[str, Any]:
        return {
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "embed_requires_grad": False,
        }

    @classmethod
    def read_own_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # Absent in older checkpoints; defaults as in vLLM's update_eagle3.
        return {
            "norm_before_residual": bool(config.get("norm_before_residual", True)),
            "norm_before_fc": bool(config.get("norm_before_fc", False)),
            "fc_norm": bool(config.get("fc_norm", False)),
            "norm_output": bool(config.get("norm_output", False)),
        }


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
            eps if config.layer_type == "qwen3" else None,
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


class Eagle3Drafter(Drafter):
    """At position t it reads the features of position t and the embedding of token t+1, and predicts token t+2."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        rotary = RotaryEmbedding(config.head_dim, config.rope_parameters)
        fused, eps = len(config.aux_layer_ids) * config.target_hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layer_ids)
        self.fc = nn.Linear(fused, hidden, bias=False)
        layers = [Eagle3Layer(config, index, rotary) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.typed_layers = tuple(layers)  # the same modules, whose class ModuleList forgets
        self.norm = RMSNorm(hidden, eps)
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
            for layer in self.typed_layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()

    def fuse(self, aux: Tensor) -> Tensor:
        """Features [..., H] from the auxiliary layers' states, side by side: [..., n_aux * H]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
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
        for layer, keys in zip(self.typed_layers, past, strict=True):
            # Only keys and values are needed of the other positions, but the next layer's come from this one's output.
            asked = queried if layer is self.typed_layers[-1] else None
            inputs, residual = layer.inputs(features, embeddings)
            allowed = mask
            if asked is not None:
                residual, allowed = take(residual, asked), take(mask[:, 0], asked)[:, None]
            features = layer.after_attention(layer.self_attn(inputs, positions, keys, allowed, asked), residual)
        return self._outputs(features)

    def decode(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, cache: Eagle3Cache
    ) -> tuple[Tensor, Tensor]:
        """Draft with a KV cache, as in serving; shapes as in :meth:`step` with B = 1."""
        embeddings = F.embedding(token_ids, self.embed_tokens)
        for layer, kept in zip(self.typed_layers, cache.layers, strict=True):
            inputs, residual = layer.inputs(features, embeddings)
            features = layer.after_attention(layer.self_attn.decode(inputs, positions, kept), residual)
        return self._outputs(features)

    def _outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(features)
        return hidden, hidden if self.config.norm_output else features

    def new_cache(self) -> Eagle3Cache:
        """An empty cache for :meth:`decode`."""
        return Eagle3Cache([KeyValueCache() for _ in self.layers])

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., draft_vocab_size]."""
        return self.lm_head(hidden)

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> Objective:
        return Eagle3Objective(self, head, kept_ids, train)

    def proposer(self, kept_ids: Tensor | None, num_speculative_tokens: int) -> Eagle3Proposer:
        return Eagle3Proposer(self, kept_ids, num_speculative_tokens)


@dataclass
class Eagle3Cache:
    """KV caches of all draft layers."""

    layers: list[KeyValueCache]

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens in every layer."""
        for layer in self.layers:
            layer.truncate(length)


class Eagle3Objective(Objective):
    """Training-time test: unroll the drafter K steps and compare each with the verifier.

    At step k, position t holds the drafter's own features of step k-1 (step 0: the verifier's), the embedding of the
    true token t+1+k, RoPE position t+k, and is compared with the verifier's distribution over token t+2+k. It counts
    where that token exists in the same document and was generated by the verifier.
    """

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> None:
        decay = 1.0 if train.step_decay is None else train.step_decay
        weights = [decay**k for k in range(train.ttt_steps)]
        super().__init__(drafter, head, kept_ids, weights, train.losses("kl_div"))

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        counted = counted_positions(batch, self.steps)
        queried = first_positions(counted.any(dim=0))
        states = torch.stack(self._unroll(batch, queried)).flatten(1, 2)
        counted = torch.stack([take(counts, queried) for counts in counted]).flatten(1)
        return self.compare_steps(batch, states, queried, counted)

    def compare_steps(
        self, batch: PackedBatch, states: Tensor, anchors: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and counts of drafts whose position k at anchor t stands for token t+2+k.

        Args:
            states: [K, B * Q, H], ready for lm_head.
            anchors: int64 [B, Q], positions of each row.
            counted: bool [K, B * Q].
        """
        rows, size = batch.token_ids.shape
        flat = (anchors + size * torch.arange(rows, device=anchors.device)[:, None]).flatten()
        steps = torch.arange(self.steps, device=flat.device)[:, None]
        targets = (flat + 1 + steps).clamp(max=rows * size - 1)
        losses, best = self.compare(batch, states, targets, counted)
        truth = batch.token_ids.flatten()[(targets + 1).clamp(max=rows * size - 1)]
        sums = losses.sum(dim=1)
        return sums, tally(sums, counted, best == truth)

    def _unroll(self, batch: PackedBatch, queried: Tensor) -> list[Tensor]:
        """Each step's hidden states [B, Q, H] at the queried positions, ready for the drafter's lm_head."""
        drafter = self.drafter
        mask = document_mask(batch.document_ids)
        past = [StepKeys() for _ in drafter.layers]
        features = drafter.fuse(batch.hidden_states[:, :, :-1].flatten(2))
        tokens = shift(batch.token_ids, 1, 0)
        hidden, features = drafter.step(features, tokens, batch.positions, past, mask, queried)
        states = [hidden]
        mask, positions = take(mask[:, 0], queried)[:, None], take(batch.positions, queried)
        for k in range(1, self.steps):
            tokens = take(shift(batch.token_ids, 1 + k, 0), queried)
            hidden, features = drafter.step(features, tokens, positions + k, past, mask)
            states.append(hidden)
        return states


def counted_positions(batch: PackedBatch, steps: int) -> Tensor:
    """bool [K, B, S]: positions t with a loss at step k: token t+2+k is in the same document, and generated."""
    counted = []
    for k in range(steps):
        same = shift(batch.document_ids, 2 + k, -1) == batch.document_ids
        counted.append(shift(batch.loss_mask, 2 + k, False) & same)
    return torch.stack(counted)


def first_positions(wanted: Tensor) -> Tensor:
    """int64 [B, Q]: the wanted positions of each row in order, then as many others as the fullest row has more."""
    width = max(1, int(wanted.sum(dim=1).max()))
    return (~wanted).int().argsort(dim=1, stable=True)[:, :width]


class Eagle3Proposer:
    """Drafts token by token, each from the features of the one before (vllm/v1/spec_decode/llm_base_proposer.py).

    Its KV cache holds the verified positions: they are fed again with the verifier's states, which overwrites what the
    drafter's own left there.
    """

    def __init__(self, drafter: Eagle3Drafter, kept_ids: Tensor | None, num_speculative_tokens: int) -> None:
        self.drafter = drafter
        self.device = drafter.lm_head.weight.device
        self.kept_ids = None if kept_ids is None else kept_ids.to(self.device)
        self.num_speculative_tokens = num_speculative_tokens
        self.cache = drafter.new_cache()
        self.length = 0

    def propose(self, states: Tensor, shifted: Sequence[int]) -> list[int]:
        """See :class:`~speculators.models.drafter.Proposer`."""
        features = self.drafter.fuse(states.flatten(1))
        hidden, features = self.decode(features, shifted, self.length)
        self.length += len(shifted)
        draft = [self.best(hidden[-1])]
        for step in range(self.num_speculative_tokens - 1):
            hidden, features = self.decode(features[-1:], draft[-1:], self.length + step)
            draft.append(self.best(hidden[-1]))
        self.cache.truncate(self.length)
        return draft

    def decode(self, features: Tensor, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Run over positions that follow those in the cache; hidden states and features [n, H]."""
        positions = torch.arange(start, start + len(token_ids), device=self.device)
        tokens = torch.tensor([list(token_ids)], device=self.device)
        hidden, features = self.drafter.decode(features[None], tokens, positions[None], self.cache)
        return hidden[0], features[0]

    def best(self, hidden: Tensor) -> int:
        """The best token (a verifier id) of one position [H]."""
        best = self.drafter.logits(hidden).argmax()
        return int(best if self.kept_ids is None else self.kept_ids[best])
