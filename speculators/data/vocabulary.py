"""The draft vocabulary: the tokens that a drafter can propose, and how its ids map to the verifier's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from speculators.errors import DataError


@dataclass(frozen=True)
class VocabMapping:
    """Which tokens are kept.

    Attributes:
        t2d: bool [V], whether a verifier token is kept.
        d2t: int64 [Vd], OFFSETS: draft id i stands for verifier id ``i + d2t[i]`` (as vLLM reads it).
    """

    t2d: Tensor
    d2t: Tensor

    @property
    def kept_ids(self) -> Tensor:
        """int64 [Vd], the kept verifier ids, ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    def validate(self) -> None:
        """Check that both tables say the same.

        Raises:
            DataError: They do not, or are of the wrong type.
        """
        if self.t2d.dtype != torch.bool or self.d2t.dtype != torch.int64 or self.t2d.ndim != 1 or self.d2t.ndim != 1:
            raise DataError("Vocabulary mapping: t2d must be a bool vector and d2t an int64 vector.")
        kept = self.kept_ids
        # nonzero() is ascending and in range, so this also says that kept_ids is.
        if not torch.equal(self.t2d.nonzero()[:, 0], kept):
            raise DataError(
                f"Vocabulary mapping: t2d keeps {int(self.t2d.sum())} of {len(self.t2d)} tokens, but not those that"
                f" d2t's {len(kept)} offsets stand for."
            )

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        return save({"t2d": self.t2d.contiguous(), "d2t": self.d2t.contiguous()})

    @classmethod
    def from_bytes(cls, data: bytes) -> VocabMapping:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            DataError: Not such a file, or its tables contradict each other.
        """
        try:
            tensors = load(data)
            mapping = cls(tensors["t2d"], tensors["d2t"])
        except (SafetensorError, KeyError) as error:
            raise DataError(f"Not a vocabulary mapping: {error}") from error
        mapping.validate()
        return mapping


def build_vocab_mapping(counts: np.ndarray, size: int, always: Sequence[int] = ()) -> VocabMapping:
    """Keep the most frequent tokens.

    Args:
        counts: int64 [V], how often each verifier token occurs in the answers.
        size: Tokens to keep. Ties go to the lower id, also among tokens that never occur.
        always: Tokens kept whatever their count (end-of-sequence tokens).

    Raises:
        DataError: ``size`` is larger than the vocabulary or smaller than ``always``, or a token of ``always`` is not in
            the vocabulary.
    """
    if size > len(counts):
        raise DataError(f"prepare.draft_vocab_size ({size}) exceeds the verifier's vocabulary ({len(counts)}).")
    forced = sorted(set(always))
    if forced and not 0 <= forced[0] <= forced[-1] < len(counts):
        raise DataError(f"End-of-sequence tokens {forced} are not all within the vocabulary of {len(counts)} tokens.")
    if len(forced) > size:
        raise DataError(f"prepare.draft_vocab_size ({size}) is too small for the {len(forced)} end-of-sequence tokens.")
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    chosen = np.concatenate([np.array(forced, dtype=np.int64), order[~np.isin(order, forced)]])[:size]
    kept = torch.from_numpy(np.sort(chosen).astype(np.int64))
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[kept] = True
    return VocabMapping(t2d, kept - torch.arange(size))
