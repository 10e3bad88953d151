"""Building blocks of Llama-style draft layers: RMS norm, rotary embedding, gated MLP."""

from __future__ import annotations

import math
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


# Keys of each supported RoPE type beside rope_type and rope_theta: those that it must have, those that it may have.
_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "truncate"},
    ),
}


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a config.json, whether written by transformers 5 (``rope_parameters``) or before."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    legacy_type = parameters.pop("type", None)
    parameters.setdefault("rope_type", legacy_type or "default")
    parameters.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return parameters


def draft_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters for a drafter of the verifier with this config.json.

    The verifier's own where the drafter's layers can have them. A drafter learns its own attention, so what belongs to
    the verifier's alone is left out: types other than default, linear, llama3 and yarn, partial rotation, the sections
    of multimodal positions, and the sliding-window layers' share where each layer type has its own.
    """
    nested = config.get("rope_parameters") or {}
    kinds = [value for value in nested.values() if isinstance(value, dict)]
    if kinds:
        config = {**config, "rope_parameters": nested.get("full_attention") or kinds[0]}
    found = rope_parameters(config)
    if found["rope_type"] == "yarn":
        found.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    required, optional = _ROPE_KEYS.get(found["rope_type"], (set(), set()))
    is_usable = found["rope_type"] in _ROPE_KEYS and all(found.get(key) is not None for key in required)
    kept = {key: found[key] for key in found if key in required | optional and found[key] is not None}
    theta = float(found["rope_theta"])
    return {"rope_type": found["rope_type"], "rope_theta": theta, **kept} if is_usable else _default_rope(theta)


def _default_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


class RotaryEmbedding(nn.Module):
    """Rotary position embedding in the half-split layout of Llama and Qwen (arXiv 2104.09864).

    Args:
        head_dim: Size of an attention head.
        parameters: ``rope_type`` (default, linear, llama3 or yarn), ``rope_theta`` and the type's own keys, as in
            transformers' ``rope_parameters``.

    Raises:
        ValueError: The type or a key is none of those, or one is missing.
    """

    def __init__(self, head_dim: int, parameters: dict[str, Any]) -> None:
        super().__init__()
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in _ROPE_KEYS:
            raise ValueError(f"rope_type {rope_type!r} is not supported; {', '.join(_ROPE_KEYS)} are")
        required, optional = _ROPE_KEYS[rope_type]
        given = {key for key, value in parameters.items() if value is not None} - {"rope_type", "rope_theta"}
        if wrong := sorted((required - given) | (given - required - optional)):
            problem = "lacks" if wrong[0] in required else "has the unknown key"
            raise ValueError(f"RoPE of type {rope_type!r} {problem} {wrong[0]!r}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        # No buffer: casting the model to bfloat16 must not round the frequencies.
        self.frequencies = float(parameters["rope_theta"]) ** -exponents
        self.scaling = 1.0
        if rope_type == "linear":
            self.frequencies = self.frequencies / parameters["factor"]
        elif rope_type == "llama3":
            self.frequencies = _llama3_frequencies(self.frequencies, parameters)
        elif rope_type == "yarn":
            self.frequencies = _yarn_frequencies(self.frequencies, parameters)
            # arXiv 2309.00071, equation 22: attention is sharpened as the context grows.
            self.scaling = parameters.get("attention_factor") or 0.1 * math.log(max(parameters["factor"], 1)) + 1

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., S, 1, head_dim] for positions [..., S]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].double() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def _llama3_frequencies(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by ``factor``, short ones kept, those between blended."""
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _yarn_frequencies(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """YaRN's scaling (arXiv 2309.00071, section 3.2): the blend runs over the dimensions, not over wave lengths."""
    half, theta = len(frequencies), float(parameters["rope_theta"])

    def dimension(turns: float) -> float:
        """Dimension whose wave turns that often within the original context."""
        wave = parameters["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return half * math.log(wave) / math.log(theta)

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / parameters["factor"])


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
