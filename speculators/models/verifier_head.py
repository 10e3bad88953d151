"""The verifier's own head: embedding, final norm and lm_head, read from its checkpoint without loading the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.errors import CheckpointError
from speculators.models.layers import rms_norm
from speculators.verifier import Verifier

# Where a text model's tensors lie, by itself or inside a vision-language or omni model.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "thinker.model.", "model.text_model.", "")
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "thinker.lm_head.weight", "model.lm_head.weight")

# The kind of the final norm, by model_type. A wrong guess would spoil every target without an error, so a type that
# is in none of these is refused.
_RMS_NORM = {
    "afmoe", "apertus", "arcee", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "exaone4",
    "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "kimi_k2", "llama", "llama4_text", "mimo",
    "mimo_v2_flash", "minicpm", "minimax_m2", "ministral", "ministral3", "mistral", "mistral4", "mixtral", "olmo2",
    "olmo3", "olmoe", "phi3", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl",
    "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss",
    "smollm3",
}  # fmt: skip
_RMS_NORM_PLUS_ONE = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "vaultgemma",
}  # fmt: skip
_LAYER_NORM = {
    "cohere", "cohere2", "phimoe", "stablelm", "starcoder2",
}  # fmt: skip
_EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")


@dataclass(frozen=True)
class LogitScaling:
    """What a verifier does with its logits after lm_head.

    Attributes:
        factor: They are multiplied by this.
        soft_cap: Before that they are squashed into ``[-soft_cap, soft_cap]`` by ``tanh``; None: they are not.
    """

    factor: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> LogitScaling:
        """As config.json's text part asks for it: Cohere multiplies, Granite divides, MiniCPM divides by its width's
        ratio, Gemma caps (vLLM: ``LogitsProcessor`` in cohere_compass.py, granite.py, gemma4.py; minicpm.py)."""
        factor = float(config.get("logit_scale") or 1) / float(config.get("logits_scaling") or 1)
        if base := config.get("dim_model_base"):
            factor *= float(base) / float(config["hidden_size"])
        return cls(factor, config.get("final_logit_softcapping"))

    def apply(self, logits: Tensor) -> Tensor:
        """The scaled logits, same shape."""
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.factor == 1 else logits * self.factor


class VerifierHead(nn.Module):
    """Turns the verifier's last hidden state into its logits at the kept token ids. Nothing in here is trained.

    Attributes:
        embed_tokens: [V, H].
        lm_head: [Vd, H], the rows at the kept ids.
        norm_weight: [H], the final norm's weight as it multiplies (Gemma's ``1 + w`` already added).
    """

    embed_tokens: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None

    def __init__(
        self,
        embed_tokens: Tensor,
        lm_head: Tensor,
        norm_weight: Tensor,
        norm_eps: float,
        norm: Literal["rms", "layer"] = "rms",
        norm_bias: Tensor | None = None,
        scaling: LogitScaling = LogitScaling(),
    ) -> None:
        super().__init__()
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.register_buffer("norm_bias", norm_bias, persistent=False)
        self.norm_eps, self.norm, self.scaling = norm_eps, norm, scaling

    @classmethod
    def load(cls, verifier: Verifier, kept_ids: Tensor | None, dtype: torch.dtype = torch.float32) -> VerifierHead:
        """Read the head of a verifier; see :meth:`read`."""
        return cls.read(verifier.path, verifier.config, kept_ids, dtype)

    @classmethod
    def read(
        cls, folder: Path, config: dict[str, Any], kept_ids: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> VerifierHead:
        """Read the head's tensors from a checkpoint's safetensors.

        Args:
            folder: The verifier's checkpoint.
            config: The text part of its config.json.
            kept_ids: int64 [Vd], ascending token ids of the draft vocabulary; None for all.
            dtype: dtype of the result.

        Raises:
            CheckpointError: The final norm's kind is not known; a tensor is missing, quantised or of a wrong shape; a
                file is missing or damaged.
        """
        model_type = str(config.get("model_type"))
        if model_type not in _RMS_NORM | _RMS_NORM_PLUS_ONE | _LAYER_NORM:
            raise CheckpointError(
                f"{folder / 'config.json'}: the final norm of model_type {model_type!r} is not known here. Known types:"
                f" {', '.join(sorted(_RMS_NORM | _RMS_NORM_PLUS_ONE | _LAYER_NORM))}."
            )
        tensors = _Tensors(folder)
        vocabulary, hidden = int(config["vocab_size"]), int(config["hidden_size"])
        embed_names = [f"{prefix}embed_tokens.weight" for prefix in _PREFIXES]
        prefix = tensors.find(embed_names).removesuffix("embed_tokens.weight")
        embed = tensors.read(f"{prefix}embed_tokens.weight", (vocabulary, hidden), dtype)
        norm = tensors.read(f"{prefix}norm.weight", (hidden,), dtype)
        if model_type in _RMS_NORM_PLUS_ONE:
            norm = norm + 1
        bias = None
        if model_type in _LAYER_NORM and f"{prefix}norm.bias" in tensors.files:
            bias = tensors.read(f"{prefix}norm.bias", (hidden,), dtype)
        # Old config.json files leave tie_word_embeddings out where it is the type's default, which is true for some.
        tied, has_head = config.get("tie_word_embeddings"), any(name in tensors.files for name in _HEAD_NAMES)
        if tied or (tied is None and not has_head):
            head = embed
        else:
            head = tensors.read(tensors.find(_HEAD_NAMES), (vocabulary, hidden), dtype)
        return cls(
            embed,
            head if kept_ids is None else head[kept_ids],
            norm,
            float(next((config[key] for key in _EPS_KEYS if config.get(key) is not None), 1e-6)),
            "layer" if model_type in _LAYER_NORM else "rms",
            bias,
            LogitScaling.of(config),
        )

    @torch.no_grad()
    def logits(self, last_state: Tensor) -> Tensor:
        """The verifier's logits [n, Vd] from its last states [n, H] (before the final norm)."""
        return self.scaling.apply(F.linear(self.normed(last_state), self.lm_head))

    def normed(self, last_state: Tensor) -> Tensor:
        """Last states after the final norm, same shape."""
        if self.norm == "layer":
            return F.layer_norm(last_state, self.norm_weight.shape, self.norm_weight, self.norm_bias, self.norm_eps)
        return rms_norm(last_state, self.norm_weight, self.norm_eps)


class _Tensors:
    """Tensors of a checkpoint by name, whichever file they lie in; only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, str] = {}
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                self.files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
        for file in sorted(folder.glob("*.safetensors")):
            with self._open(file.name) as opened:
                self.files.update(dict.fromkeys(opened.keys(), file.name))

    def find(self, names: Sequence[str]) -> str:
        """The first of these names that there is."""
        for name in names:
            if name in self.files:
                return name
        raise CheckpointError(f"{self.folder} has no tensor named {' or '.join(names)}.")

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor ``name``, which has to have that shape."""
        with self._open(self.files[self.find([name])]) as opened:
            tensor: Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {tensor.dtype} {list(tensor.shape)}; a drafter needs the unquantised"
                f" {list(shape)} that config.json describes."
            )
        return tensor.to(dtype)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file} is missing or damaged: {error}") from error
