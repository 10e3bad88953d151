"""EAGLE-3 (arXiv 2503.01840): an autoregressive drafter fed with hidden states of several verifier layers.

Parameter names are those that vLLM's loader expects (vllm/model_executor/models/llama_eagle3.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.config import TrainConfig
from speculators.models.attention import DraftAttention, KeyValueCache, StepKeys, take
from speculators.models.autoregressive import AutoregressiveDrafter, AutoregressiveObjective, DraftCache
from speculators.models.drafter import DrafterConfig, Objective
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


class Eagle3Drafter(AutoregressiveDrafter):
    """Its features are states of several verifier layers, fused."""

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

    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
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
        self, features: Tensor, token_ids: Tensor, positions: Tensor, cache: DraftCache
    ) -> tuple[Tensor, Tensor]:
        embeddings = F.embedding(token_ids, self.embed_tokens)
        for layer, kept in zip(self.typed_layers, cache.layers, strict=True):
            inputs, residual = layer.inputs(features, embeddings)
            features = layer.after_attention(layer.self_attn.decode(inputs, positions, kept), residual)
        return self._outputs(features)

    def _outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(features)
        return hidden, hidden if self.config.norm_output else features

    def new_cache(self) -> DraftCache:
        return DraftCache([KeyValueCache() for _ in self.layers])

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> Objective:
        decay = 1.0 if train.step_decay is None else train.step_decay
        weights = [decay**k for k in range(train.ttt_steps)]
        return AutoregressiveObjective(self, head, kept_ids, weights, train.losses("kl_div"))
