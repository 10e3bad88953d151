"""Building blocks of Llama-style draft layers: RMS norm, rotary embedding, gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in float32 at least (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding in the half-split layout of Llama and Qwen (arXiv 2104.09864).

    Args:
        head_dim: Size of an attention head.
        parameters: ``rope_type`` (default, linear, llama3, yarn, ...), ``rope_theta`` and the type's own keys, as in
            transformers' ``rope_parameters``.
        max_position_embeddings: Longest position that the verifier was made for.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, parameters: dict[str, Any], max_position_embeddings: int) -> None:
        super().__init__()
        rope_type = parameters.get("rope_type", "default")
        self.scaling = 1.0
        if rope_type == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
            inv_freq = float(parameters["rope_theta"]) ** -exponents
        else:
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rope_parameters=dict(parameters),
            )
            inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        self.register_buffer("inv_freq", inv_freq.double(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., S, 1, head_dim] for positions [..., S]."""
        angles = positions[..., None].double() * self.inv_freq.double()
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to x [..., S, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
