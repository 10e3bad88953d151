"""What all drafting methods have in common: a drafter, the objective that trains it, the proposer that drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from speculators.config import TrainConfig
from speculators.errors import CheckpointError
from speculators.models.batch import PackedBatch
from speculators.models.layers import draft_rope_parameters
from speculators.models.losses import MAX_LOGITS, LossWeights, head_losses, in_chunks
from speculators.models.verifier_head import VerifierHead
from speculators.verifier import Verifier


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter: the part that every method has. Each method's own class adds its keys of config.json.

    Attributes:
        num_layers: Draft layers.
        vocab_size: The verifier's vocabulary.
        draft_vocab_size: Tokens that the drafter can propose.
        rope_parameters: As in transformers: ``rope_type``, ``rope_theta`` and the type's own keys.
        target_hidden_size: Width of the verifier's hidden states.
        aux_layer_ids: Verifier layers that feed the drafter, 0 being the embedding's output.
        layer_type: Draft layers as in Llama (``llama``), or with norms on queries and keys as in Qwen3 (``qwen3``).
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
    layer_type: str = "llama"

    aux_key: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    """The key of config.json that holds ``aux_layer_ids``."""
    default_num_layers: ClassVar[int] = 1

    @classmethod
    def for_verifier(cls, verifier: Verifier, setting: DraftSetting) -> Self:
        """A drafter whose layers have the shape of the verifier's own.

        Raises:
            CheckpointError: The verifier's attention heads cannot be those of a drafter.
        """
        return cls(**cls.common_fields(verifier, setting), **cls.own_fields(setting))

    @classmethod
    def own_fields(cls, setting: DraftSetting) -> dict[str, Any]:
        """The method's own fields for a new drafter."""
        return {}

    @classmethod
    def common_fields(cls, verifier: Verifier, setting: DraftSetting) -> dict[str, Any]:
        """The fields of this class, for a new drafter of a verifier."""
        text = verifier.config
        hidden, heads = verifier.hidden_size, int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or hidden // heads)
        key_value_heads = int(text.get("num_key_value_heads") or heads)
        if heads % key_value_heads or head_dim % 2:
            raise CheckpointError(
                f"{verifier.path / 'config.json'}: {heads} attention heads of size {head_dim} with {key_value_heads}"
                " key-value heads; a drafter needs an even head size and a multiple of the key-value heads."
            )
        width = text.get("intermediate_size")
        if isinstance(width, list):  # one a layer, as in Gemma 3n
            width = max(width)
        return {
            "hidden_size": hidden,
            "intermediate_size": int(width or 4 * hidden),
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "head_dim": head_dim,
            "num_layers": setting.train.num_layers or cls.default_num_layers,
            "vocab_size": verifier.vocab_size,
            "draft_vocab_size": setting.draft_vocab_size,
            "rms_norm_eps": float(text.get("rms_norm_eps") or 1e-6),
            "rope_parameters": draft_rope_parameters(text),
            "max_position_embeddings": int(text.get("max_position_embeddings") or 4096),
            "target_hidden_size": hidden,
            "aux_layer_ids": tuple(setting.aux_layer_ids),
        }

    def layer_keys(self) -> dict[str, Any]:
        """The method's own keys of config.json's ``transformer_layer_config``."""
        return {}

    def own_keys(self) -> dict[str, Any]:
        """The method's own keys of config.json, as vLLM reads them."""
        return {}

    @classmethod
    def read_own_keys(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of this method from config.json's own keys: the inverse of :meth:`own_keys`.

        Raises:
            KeyError: A key is missing.
            ValueError: A value is wrong; says which and what is right.
        """
        return {}


@dataclass(frozen=True)
class DraftSetting:
    """What a new drafter is made for, beside the verifier.

    Attributes:
        draft_vocab_size: Tokens that it can propose.
        num_speculative_tokens: Draft length K.
        mask_token_id: A token that stands for "not known yet" in methods that draft in parallel.
    """

    train: TrainConfig
    aux_layer_ids: Sequence[int]
    draft_vocab_size: int
    num_speculative_tokens: int
    mask_token_id: int


class Choice:
    """How a proposer takes a token from its logits: the best one."""

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> int:
        """A token.

        Args:
            logits: [n].
            ids: int64 [n], the tokens (verifier ids) that they stand for; None for 0 to n-1.
        """
        return self._token(logits.argmax(), ids)

    @staticmethod
    def _token(place: Tensor, ids: Tensor | None) -> int:
        return int(place if ids is None else ids[place])


BEST = Choice()


class SampledChoice(Choice):
    """A random token at a temperature.

    Attributes:
        distributions: For each token since the last :meth:`clear`, the distribution [V] that it was drawn from.
    """

    def __init__(self, vocab_size: int, temperature: float, generator: torch.Generator) -> None:
        self.vocab_size, self.temperature, self.generator = vocab_size, temperature, generator
        self.distributions: list[Tensor] = []

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> int:
        probabilities = (logits.float() / self.temperature).softmax(dim=-1)
        places = torch.arange(len(logits), device=logits.device) if ids is None else ids
        self.distributions.append(probabilities.new_zeros(self.vocab_size).index_put((places,), probabilities))
        return self._token(torch.multinomial(probabilities, 1, generator=self.generator)[0], ids)

    def clear(self) -> None:
        """Forget the distributions: a new draft begins."""
        self.distributions = []


class Proposer(Protocol):
    """Drafts for one sequence, with what it keeps of the verified positions: what vLLM's proposer does."""

    length: int
    """Verified positions that it has read."""

    def propose(self, states: Tensor, shifted: Sequence[int]) -> list[int]:
        """Draft K tokens, each as the proposer's :class:`Choice` takes it.

        Args:
            states: The verifier's states [n, layers, H] at the positions verified since the last proposal.
            shifted: For each of these positions, the token after it; the last one follows all that is verified.
        """
        ...


class Drafter(nn.Module, ABC):
    """A drafter; its parameters have the names that vLLM's loader expects.

    ``embed_tokens`` [V, H] is the verifier's, frozen, and not part of the checkpoint: vLLM shares the verifier's.
    """

    config: DrafterConfig
    embed_tokens: Tensor
    lm_head: nn.Linear
    full_vocabulary: ClassVar[bool] = False
    """Whether the method cannot have a reduced vocabulary."""

    @property
    def state_layer_ids(self) -> tuple[int, ...]:
        """Verifier layers whose states a proposer reads, 0 being the embedding's output."""
        return self.config.aux_layer_ids

    @property
    def shares_lm_head(self) -> bool:
        """Whether lm_head is the verifier's, frozen and not part of the checkpoint."""
        return False

    def stored_tensors(self) -> dict[str, Tensor]:
        """What belongs into the checkpoint, by name."""
        state = self.state_dict()
        if self.shares_lm_head:
            del state["lm_head.weight"]
        return state

    @abstractmethod
    def initialise(self, head: VerifierHead, states: Tensor | None = None) -> None:
        """Start from what the verifier knows.

        Args:
            head: The verifier's head, its ``lm_head`` at the draft vocabulary.
            states: Auxiliary states [n, n_aux * H] of some tokens of the data, for methods that can make use of them.
        """

    @abstractmethod
    def objective(self, head: VerifierHead, kept_ids: Tensor | None, train: TrainConfig) -> Objective:
        """What training minimises.

        Args:
            head: The verifier's head at the draft vocabulary.
            kept_ids: int64 [Vd], verifier ids of the draft vocabulary; None when it is the whole one.
        """

    @abstractmethod
    def proposer(self, kept_ids: Tensor | None, num_speculative_tokens: int, choice: Choice = BEST) -> Proposer:
        """A proposer for one new sequence, in eval mode."""


class Objective(nn.Module, ABC):
    """Loss and accuracies of a drafter on packed batches, draft position by draft position.

    Args:
        drafter: What is trained.
        head: The verifier's head, at the draft vocabulary.
        kept_ids: int64 [Vd], verifier ids of the draft vocabulary; None when it is the whole one.
        weights: Weight of each draft position's mean loss, K of them.
        loss: Losses that are summed up, and how much of each.
    """

    kept_ids: Tensor | None
    weights: Tensor

    def __init__(
        self,
        drafter: Drafter,
        head: VerifierHead,
        kept_ids: Tensor | None,
        weights: Sequence[float],
        loss: LossWeights,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._head = (head,)  # in a tuple: frozen, so not a submodule that DDP would broadcast
        self.register_buffer("kept_ids", kept_ids, persistent=False)
        self.register_buffer("weights", torch.tensor(weights), persistent=False)
        self.loss = loss

    @property
    def steps(self) -> int:
        """Draft positions K."""
        return len(self.weights)

    @property
    def head(self) -> VerifierHead:
        """The verifier's head."""
        return self._head[0]

    @abstractmethod
    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Loss and counts of a batch.

        Returns:
            Loss sums in nats [K], and float64 [5, K] for :class:`~speculators.training.metrics.StepSums`: the loss
            again, detached; positions with a loss; those where the drafter's best token is the true one; those where
            all earlier draft positions were right; those of them that are right as well.
        """

    def compare(self, batch: PackedBatch, hidden: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, ...]:
        """Compare draft positions with the verifier, whose distributions are computed once each.

        Args:
            hidden: [K, A, H], ready for the drafter's lm_head: A drafts of K positions.
            targets: int64 [K, A]: the position of the flattened batch whose next-token distribution the drafter is to
                give. Within a draft position, those that count are all different.
            counted: bool [K, A]: which of them have a loss.

        Returns:
            Losses [K, A], the best tokens (verifier ids) int64 [K, A], and whatever else :meth:`compare_rows` returns,
            each [K, A]; zero where nothing counts.
        """
        steps = torch.arange(self.steps, device=hidden.device)
        wanted = torch.zeros(batch.token_ids.numel(), dtype=torch.bool, device=hidden.device)
        wanted[targets[counted]] = True
        rows = wanted.nonzero()[:, 0]
        k, draft = counted.nonzero(as_tuple=True)
        place = (wanted.cumsum(dim=0) - 1)[targets[k, draft]]
        index = torch.zeros(len(rows), self.steps, dtype=torch.int64, device=hidden.device)
        index[place, k] = draft
        valid = torch.zeros_like(index, dtype=torch.bool)
        valid[place, k] = True
        tokens = batch.token_ids.flatten()
        results = in_chunks(
            self.compare_rows,
            max(1, MAX_LOGITS // (self.steps * len(self.head.lm_head))),
            hidden.transpose(0, 1)[index, steps],
            batch.hidden_states[:, :, -1].flatten(0, 1)[rows],
            tokens[rows],
            tokens[(rows + 1).clamp(max=len(tokens) - 1)],
            valid,
        )
        loss, best, *more = results
        values = [loss, self.verifier_ids(best), *more]
        return tuple(x.new_zeros(counted.shape).index_put((k, draft), x[place, k]) for x in values)

    def compare_rows(
        self, hidden: Tensor, last_states: Tensor, tokens: Tensor, next_tokens: Tensor, counted: Tensor
    ) -> tuple[Tensor, ...]:
        """Losses and best tokens (draft ids) [n, K] of n target positions.

        Args:
            hidden: [n, K, H], for each of them the drafts of K lengths that are to give its distribution.
            last_states: [n, H], the verifier's.
            tokens: int64 [n], the tokens there.
            next_tokens: int64 [n], the true next tokens.
            counted: bool [n, K].
        """
        return head_losses(hidden, self.draft_head, self.head.logits(last_states), counted, self.loss)

    @property
    def draft_head(self) -> Tensor:
        """The drafter's lm_head [Vd, H]."""
        return self.drafter.lm_head.weight

    def verifier_ids(self, draft_ids: Tensor) -> Tensor:
        """Verifier ids of draft ids, same shape."""
        return draft_ids if self.kept_ids is None else self.kept_ids[draft_ids]


def tally(losses: Tensor, counted: Tensor, correct: Tensor) -> Tensor:
    """The counts that :meth:`Objective.forward` returns.

    Args:
        losses: Loss sums [K].
        counted: bool [K, ...], where draft position k of a draft has a loss; same places for all k.
        correct: bool [K, ...], where it proposes the true token.
    """
    correct = counted & correct
    right = correct.cumprod(dim=0).bool()
    eligible = counted.clone()
    eligible[1:] &= right[:-1]
    numbers = [x.flatten(1).sum(dim=1).double() for x in (counted, correct, eligible, right)]
    return torch.stack([losses.detach().double(), *numbers])


def shift(x: Tensor, by: int, fill: int | bool) -> Tensor:
    """x[:, t + by] at t, ``fill`` past the end."""
    return nn.functional.pad(x[:, by:], (0, min(by, x.shape[1])), value=fill)


def batch_generator(batch: PackedBatch) -> torch.Generator:
    """Random numbers that are others for every batch, and the same whenever a batch comes again (a resumed run)."""
    return torch.Generator().manual_seed(int((batch.token_ids * (batch.positions + 1)).sum()))
