"""The draft vocabulary against a naive computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save

from speculators.data.vocabulary import VocabMapping, build_vocab_mapping
from speculators.errors import DataError


@pytest.mark.parametrize("seed", range(20))
def test_against_naive(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(10, 200))
    size = int(rng.integers(5, vocab + 1))
    counts = rng.integers(0, 4, vocab) * (rng.random(vocab) < rng.random())
    always = [int(t) for t in rng.integers(0, vocab, rng.integers(0, 4))]

    mapping = build_vocab_mapping(counts, size, always)

    kept = set(always)
    for token in sorted(range(vocab), key=lambda token: (-counts[token], token)):
        if len(kept) < size:
            kept.add(token)
    expected = sorted(kept)
    assert mapping.kept_ids.tolist() == expected
    assert [i + int(offset) for i, offset in enumerate(mapping.d2t)] == expected
    assert mapping.t2d.nonzero()[:, 0].tolist() == expected
    assert mapping.t2d.dtype == torch.bool
    assert mapping.d2t.dtype == torch.int64
    assert len(mapping.t2d) == vocab
    mapping.validate()


def test_fills_with_lowest_unused_ids() -> None:
    counts = np.zeros(20, dtype=np.int64)
    counts[[7, 12]] = [5, 9]
    assert build_vocab_mapping(counts, 6, always=[19]).kept_ids.tolist() == [0, 1, 2, 7, 12, 19]


def test_what_cannot_be_built() -> None:
    counts = np.ones(10, dtype=np.int64)
    with pytest.raises(DataError, match=r"draft_vocab_size \(11\) exceeds the verifier's vocabulary \(10\)"):
        build_vocab_mapping(counts, 11)
    with pytest.raises(DataError, match="too small for the 3"):
        build_vocab_mapping(counts, 2, always=[1, 2, 3])
    with pytest.raises(DataError, match="within the vocabulary of 10"):
        build_vocab_mapping(counts, 5, always=[10])


def test_bytes_round_trip() -> None:
    mapping = build_vocab_mapping(np.arange(50), 9, always=[0])
    again = VocabMapping.from_bytes(mapping.to_bytes())
    assert torch.equal(again.t2d, mapping.t2d)
    assert torch.equal(again.d2t, mapping.d2t)
    assert mapping.to_bytes() == again.to_bytes()


@pytest.mark.parametrize(
    "tensors",
    [
        {"t2d": torch.tensor([True, False, True])},
        {"t2d": torch.tensor([1, 0, 1]), "d2t": torch.tensor([0, 1])},
        {"t2d": torch.tensor([True, False, True]), "d2t": torch.tensor(0)},
        {"t2d": torch.tensor([True, False, True]), "d2t": torch.tensor([0, 1], dtype=torch.int32)},
        {"t2d": torch.tensor([True, False, True]), "d2t": torch.tensor([0, 2])},
        {"t2d": torch.tensor([True, False, True]), "d2t": torch.tensor([2, -1])},
        {"t2d": torch.tensor([True, False, True]), "d2t": torch.tensor([0])},
    ],
    ids=["no d2t", "not bool", "scalar", "int32", "out of range", "descending", "other length"],
)
def test_contradictory_tables_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(DataError, match="ocabulary mapping"):
        VocabMapping.from_bytes(save(tensors))


def test_damaged_bytes_are_refused() -> None:
    data = build_vocab_mapping(np.arange(50), 9).to_bytes()
    with pytest.raises(DataError, match="Not a vocabulary mapping"):
        VocabMapping.from_bytes(data[:-20])
