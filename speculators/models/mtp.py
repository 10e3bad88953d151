"""Multi-token prediction (MTP): fine-tuning the verifier's own head to draft further (FastMTP, arXiv:2509.18362).

The decoder layer is the family's own, from transformers; what is around it follows vllm/model_executor/models/
mimo_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py, deepseek_mtp.py and glm4_moe_mtp.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from speculators.checkpoints.stitch import mtp_family, mtp_prefix
from speculators.config import TrainConfig
from speculators.errors import CheckpointError
from speculators.models.attention import KeyValueCache, StepKeys, attend_cached, attend_steps, take
from speculators.models.autoregressive import AutoregressiveDrafter, AutoregressiveObjective, DraftCache
from speculators.models.drafter import DrafterConfig, DraftSetting
from speculators.models.verifier_head import VerifierHead
from speculators.verifier import Verifier, read_architectures, read_text_config

_BETA = 0.6  # FastMTP's decay of the loss along the draft
_ATTENTION = "speculators_draft"
_EXPERT = re.compile(r"(?P<where>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


@dataclass(frozen=True)
class _Family:
    """How a family of verifiers builds its head.

    Attributes:
        module: Of transformers, below ``transformers.models``.
        names: Prefix of its classes' names, and the configuration's class.
        embedding_norm, hidden_norm, projection, final_norm, layer: Their names in the checkpoint.
        hidden_first: The projection reads the hidden state before the embedding, not after it.
        normed_states: The first step reads the verifier's last state after the final norm.
        normed_features: Each further step reads the output after the head's final norm.
        drops_first: The embedding at position 0 is zero.
        own_index: The layer is built as the one after the verifier's last, not as a first one.
    """

    module: str
    names: tuple[str, str]
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    layer: str
    hidden_first: bool = False
    normed_states: bool = True
    normed_features: bool = True
    drops_first: bool = False
    own_index: bool = False

    def classes(self) -> tuple[Any, Any, Any, Any]:
        """Configuration, decoder layer, norm and rotary embedding."""
        models = import_module(f"transformers.models.{self.module}")
        modeling = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        prefix, config = self.names
        rotary = getattr(modeling, f"{prefix}TextRotaryEmbedding", None) or getattr(
            modeling, f"{prefix}RotaryEmbedding"
        )
        return (
            getattr(models, config),
            getattr(modeling, f"{prefix}DecoderLayer"),
            getattr(modeling, f"{prefix}RMSNorm"),
            rotary,
        )


_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")
_FAMILIES = {
    "mimo": _Family(
        "qwen2",
        ("Qwen2", "Qwen2Config"),
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
        hidden_first=True,
        normed_states=False,
        drops_first=True,
    ),
    "qwen3_next": _Family("qwen3_next", ("Qwen3Next", "Qwen3NextConfig"), *_QWEN),
    "qwen3_5": _Family("qwen3_5", ("Qwen3_5", "Qwen3_5TextConfig"), *_QWEN),
    "qwen3_5_moe": _Family("qwen3_5_moe", ("Qwen3_5Moe", "Qwen3_5MoeTextConfig"), *_QWEN),
    "deepseek_v3": _Family(
        "deepseek_v3", ("DeepseekV3", "DeepseekV3Config"), *_DEEPSEEK, drops_first=True, own_index=True
    ),
    "glm4_moe": _Family(
        "glm4_moe", ("Glm4Moe", "Glm4MoeConfig"), *_DEEPSEEK, drops_first=True, own_index=True, normed_features=False
    ),
}


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """Shape of a verifier's MTP head.

    Attributes:
        family: As :func:`~speculators.checkpoints.stitch.mtp_family` names it.
        verifier_layers: The verifier's decoder layers.
        verifier_config: The text part of the verifier's config.json.
    """

    family: str
    verifier_layers: int
    verifier_config: dict[str, Any]

    @classmethod
    def for_verifier(cls, verifier: Verifier, setting: DraftSetting) -> Self:
        return cls.for_folder(verifier.path)

    @classmethod
    def for_folder(cls, folder: Path) -> Self:
        """The head of the verifier in this folder.

        Raises:
            CheckpointError: The verifier is of no family that has one.
        """
        text = read_text_config(folder)
        vocabulary, hidden, heads = int(text["vocab_size"]), int(text["hidden_size"]), int(text["num_attention_heads"])
        return cls(
            hidden_size=hidden,
            intermediate_size=int(text.get("intermediate_size") or 4 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            num_layers=1,
            vocab_size=vocabulary,
            draft_vocab_size=vocabulary,
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            rope_parameters={},
            max_position_embeddings=int(text.get("max_position_embeddings") or 4096),
            target_hidden_size=hidden,
            aux_layer_ids=(),
            family=mtp_family(text, read_architectures(folder), folder / "config.json"),
            verifier_layers=int(text["num_hidden_layers"]),
            verifier_config=text,
        )

    @property
    def prefix(self) -> str:
        """What the names of the head's tensors start with in the verifier's checkpoint."""
        return mtp_prefix(self.family, self.verifier_layers)


class MtpDrafter(AutoregressiveDrafter):
    """The verifier's MTP head; its features are the verifier's last state."""

    config: MtpConfig
    full_vocabulary: ClassVar[bool] = True

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config, self.family = config, _FAMILIES[config.family]
        settings, layer, norm, rotary = self.family.classes()
        text, hidden, eps = dict(config.verifier_config), config.hidden_size, config.rms_norm_eps
        if not self.family.own_index:
            text |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "use_sliding_window": False}
        hf_config = settings.from_dict(text)
        hf_config._attn_implementation = _ATTENTION
        self.embedding_norm, self.hidden_norm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer(hf_config, config.verifier_layers if self.family.own_index else 0)
        self.final_norm = norm(hidden, eps=eps)
        self._rotary = (rotary(hf_config),)  # in a tuple: nothing of it belongs to the head's state
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.lm_head.requires_grad_(False)
        self.register_buffer("embed_tokens", torch.zeros(config.vocab_size, hidden), persistent=False)
        self._head: tuple[VerifierHead, ...] = ()
        self._experts_apart = False

    @property
    def state_layer_ids(self) -> tuple[int, ...]:
        return (self.config.verifier_layers,)

    @property
    def shares_lm_head(self) -> bool:
        return True

    def stored_tensors(self) -> dict[str, Tensor]:
        """The head's tensors, under the names that they have in the verifier's checkpoint."""
        stored: dict[str, Tensor] = {}
        for name, tensor in super().stored_tensors().items():
            own = self._checkpoint_name(name)
            if not self._experts_apart or ".experts." not in own:
                stored[own] = tensor
                continue
            parts = (
                {"down": tensor}
                if own.endswith(".down_proj")
                else dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True))
            )
            for part, stacked in parts.items():
                for index, expert in enumerate(stacked):
                    stored[f"{own.rpartition('.')[0]}.{index}.{part}_proj.weight"] = expert
        return stored

    def load_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a head, in the dtype of this one's parameters.

        Args:
            tensors: By the names of the verifier's checkpoint; experts one by one or fused.

        Raises:
            CheckpointError: Names the first tensor that is missing, unknown, or of a wrong shape.
        """
        self._experts_apart = any(_EXPERT.match(name) for name in tensors)
        expected = self.stored_tensors()
        for name, tensor in expected.items():
            if name not in tensors:
                raise CheckpointError(f"The MTP head has no tensor {name}.")
            if tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"The MTP head's tensor {name} is {list(tensors[name].shape)}; the verifier's config.json asks for"
                    f" {list(tensor.shape)}."
                )
        if unknown := sorted(set(tensors) - set(expected)):
            raise CheckpointError(f"Tensor {unknown[0]} is unknown to an MTP head of {self.config.family}.")
        with torch.no_grad():
            for name, tensor in expected.items():  # views of the parameters
                tensor.copy_(tensors[name])

    def _checkpoint_name(self, name: str) -> str:
        module, _, rest = name.partition(".")
        if module == "layer":
            return f"{self.config.prefix}{self.family.layer}{rest}"
        return f"{self.config.prefix}{getattr(self.family, module)}.{rest}"

    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
        """Take over what the verifier shares; :meth:`load_head` brings the head itself."""
        with torch.no_grad():
            self.embed_tokens.copy_(head.embed_tokens)
            self.lm_head.weight.copy_(head.lm_head)
        self._head = (head,)

    def fuse(self, states: Tensor) -> Tensor:
        return self._head[0].normed(states) if self.family.normed_states else states

    def step(
        self,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        past: list[StepKeys],
        mask: Tensor,
        queried: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden, features = self._run(features, token_ids, positions, past[0], mask)
        return (hidden, features) if queried is None else (take(hidden, queried), take(features, queried))

    def decode(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, cache: DraftCache
    ) -> tuple[Tensor, Tensor]:
        return self._run(features, token_ids, positions, cache.layers[0], None)

    def _run(
        self,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        past: StepKeys | KeyValueCache,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        embeddings = F.embedding(token_ids, self.embed_tokens)
        if self.family.drops_first:
            embeddings = embeddings.masked_fill(positions[..., None] == 0, 0.0)
        parts = [self.embedding_norm(embeddings), self.hidden_norm(features)]
        inputs = self.projection(torch.cat(parts[::-1] if self.family.hidden_first else parts, dim=-1))
        rotary = self._rotary[0].to(inputs.device)
        output = self.layer(
            hidden_states=inputs,
            attention_mask=mask,
            position_embeddings=rotary(inputs, positions),
            draft_keys=past,
        )
        hidden = self.final_norm(output)
        return hidden, hidden if self.family.normed_features else output

    def new_cache(self) -> DraftCache:
        return DraftCache([KeyValueCache()])

    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> MtpObjective:
        decay = _BETA if train.step_decay is None else train.step_decay
        weights = [decay**k for k in range(train.ttt_steps)]
        weights = [weight / sum(weights) for weight in weights]
        return MtpObjective(self, head, kept_ids, weights, train.losses("ce"), from_data=train.loss is None)


class MtpObjective(AutoregressiveObjective):
    """Training-time test with cross entropy on the data's own tokens, unless other losses are asked for."""

    def __init__(self, *arguments: Any, from_data: bool) -> None:
        super().__init__(*arguments)
        self.from_data = from_data

    def compare_rows(
        self, hidden: Tensor, last_states: Tensor, tokens: Tensor, next_tokens: Tensor, counted: Tensor
    ) -> tuple[Tensor, ...]:
        if not self.from_data:
            return super().compare_rows(hidden, last_states, tokens, next_tokens, counted)
        logits = F.linear(hidden, self.draft_head)
        log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        losses = -log_q.gather(-1, next_tokens[:, None, None].expand(*counted.shape, 1))[..., 0]
        return torch.where(counted, losses, 0.0), logits.detach().argmax(dim=-1)


def _draft_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    draft_keys: StepKeys | KeyValueCache,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' layers, which hand over all but the first five arguments as they got them."""
    query = query * scaling
    if isinstance(draft_keys, KeyValueCache):
        mixed = attend_cached(query, key, value, draft_keys)
    else:
        assert attention_mask is not None
        mixed = attend_steps(query, key, value, draft_keys, attention_mask)
    return mixed.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _draft_attention)
