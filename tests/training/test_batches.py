"""The plan of an epoch, packing, and the loader thread."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from speculators.data.prepare import Sample
from speculators.errors import StoreError, TrainingError
from speculators.training.batches import BatchLoader, pack_batch, pack_rows, plan_epoch

HIDDEN = 8
LAYERS = 3


def random_lengths(count: int, seed: int = 0, longest: int = 90) -> dict[str, int]:
    generator = random.Random(seed)
    return {f"prompt-{i}/0": generator.randint(3, longest) for i in range(count)}


def make_samples(lengths: dict[str, int]) -> dict[str, Sample]:
    samples = {}
    for number, (sample_id, tokens) in enumerate(lengths.items()):
        samples[sample_id] = Sample(
            sample_id=sample_id,
            prompt_id=sample_id.split("/")[0],
            split="train",
            token_ids=np.arange(tokens, dtype=np.int32) + 100 * number,
            loss_mask=np.arange(tokens) >= 2,
            prompt_length=2,
        )
    return samples


class FakeReader:
    """Hidden states whose every element is the sample's own token position; may fail at one sample."""

    layer_ids = tuple(range(LAYERS))
    hidden_size = HIDDEN
    parallel_reads = 4
    read_bytes = 0

    def __init__(self, lengths: dict[str, int], broken: str | None = None) -> None:
        self.lengths, self.broken = lengths, broken
        self.reads: list[str] = []

    def read(self, sample_id: str) -> torch.Tensor:
        if sample_id == self.broken:
            raise StoreError(f"shard of {sample_id} is damaged")
        self.reads.append(sample_id)
        rows = self.lengths[sample_id] - 1
        return torch.arange(rows, dtype=torch.float32)[:, None, None].expand(rows, LAYERS, HIDDEN)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_sample_exactly_once_within_the_budget(ranks: int, epoch: int) -> None:
    lengths = random_lengths(101)
    plan = plan_epoch(lengths, 256, ranks, (5, epoch))
    counts = Counter(s for step in plan for share in step for s in share)
    assert counts == Counter(list(lengths))
    for step in plan:
        assert len(step) == ranks
        assert 0 < sum(lengths[s] for share in step for s in share) <= 256


def test_the_plan_is_deterministic_and_differs_by_epoch_and_seed() -> None:
    lengths = random_lengths(50)
    assert plan_epoch(lengths, 300, 2, (1, 4)) == plan_epoch(dict(lengths), 300, 2, (1, 4))
    reordered = dict(sorted(lengths.items(), reverse=True))
    assert plan_epoch(lengths, 300, 2, (1, 4)) == plan_epoch(reordered, 300, 2, (1, 4))
    assert plan_epoch(lengths, 300, 2, (1, 4)) != plan_epoch(lengths, 300, 2, (1, 5))
    assert plan_epoch(lengths, 300, 2, (1, 4)) != plan_epoch(lengths, 300, 2, (2, 4))


def test_global_batches_do_not_depend_on_the_number_of_ranks() -> None:
    lengths = random_lengths(80)
    one = [sorted(step[0]) for step in plan_epoch(lengths, 512, 1, (0, 0))]
    four = [sorted(s for share in step for s in share) for step in plan_epoch(lengths, 512, 4, (0, 0))]
    assert one == four


def test_work_is_balanced_by_tokens() -> None:
    lengths = random_lengths(400, longest=60)
    for step in plan_epoch(lengths, 1024, 4, (0, 0)):
        loads = [sum(lengths[s] for s in share) for share in step]
        assert max(loads) - min(loads) <= 60


def test_the_last_steps_share_a_small_remainder() -> None:
    lengths = {f"s{i}": 10 for i in range(21)}
    plan = plan_epoch(lengths, 100, 1, None)
    assert [len(step[0]) for step in plan] == [10, 5, 6]


def test_fewer_samples_than_ranks_gives_empty_shares() -> None:
    assert plan_epoch({"a": 5, "b": 7}, 100, 3, None) == [[["b"], ["a"], []]]
    assert plan_epoch({}, 100, 3, (0, 0)) == []


def test_a_sample_longer_than_a_step_is_an_error_that_names_it() -> None:
    with pytest.raises(TrainingError, match=r"'b' has 70 tokens.*64.*tokens_per_batch"):
        plan_epoch({"a": 5, "b": 70}, 64, 1, (0, 0))


@pytest.mark.parametrize("hidden_size", [1, 64, 4096])
def test_rows_hold_every_sample_and_never_overflow(hidden_size: int) -> None:
    lengths = random_lengths(40, seed=3)
    rows, row_length = pack_rows(list(lengths), lengths, hidden_size)
    assert sorted(s for row in rows for s in row) == sorted(lengths)
    assert max(sum(lengths[s] for s in row) for row in rows) <= row_length
    assert row_length % 8 == 0


def test_narrow_models_get_short_rows_and_wide_ones_little_padding() -> None:
    lengths = random_lengths(40, seed=3)
    narrow_rows, narrow = pack_rows(list(lengths), lengths, 1)
    wide_rows, wide = pack_rows(list(lengths), lengths, 100_000)
    assert narrow < wide
    assert len(wide_rows) * wide <= len(narrow_rows) * narrow


def test_a_packed_batch_holds_the_samples_as_they_are() -> None:
    lengths = {"a": 5, "b": 3, "c": 6}
    samples, reader = make_samples(lengths), FakeReader(lengths)
    states = {s: reader.read(s) for s in lengths}
    batch = pack_batch([["a", "b"], ["c"]], 8, samples, states, (LAYERS, HIDDEN), torch.float32)
    assert batch.token_ids.tolist() == [[0, 1, 2, 3, 4, 100, 101, 102], [200, 201, 202, 203, 204, 205, 0, 0]]
    assert batch.document_ids.tolist() == [[0] * 5 + [1] * 3, [2] * 6 + [-1] * 2]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.hidden_states.shape == (2, 8, LAYERS, HIDDEN)
    assert batch.hidden_states.dtype == torch.float32
    # The last token of a sample has no state.
    expected = [[0, 1, 2, 3, 0, 0, 1, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.hidden_states[:, :, 1, 2].tolist() == expected


def test_the_loader_yields_the_plan_in_order_and_ends() -> None:
    lengths = random_lengths(30)
    shares = [step[1] for step in plan_epoch(lengths, 200, 2, (0, 0))] + [[]]
    reader = FakeReader(lengths)
    samples = make_samples(lengths)
    with BatchLoader(shares, samples, reader, torch.float32) as loader:
        batches = list(loader)
    assert len(batches) == len(shares)
    for share, batch in zip(shares, batches, strict=True):
        expected = sorted(t for s in share for t in samples[s].token_ids.tolist())
        assert sorted(batch.token_ids[batch.document_ids >= 0].tolist()) == expected
    assert not batches[-1].loss_mask.any()
    assert sorted(reader.reads) == sorted(s for share in shares for s in share)


def test_a_resumed_loader_gives_the_same_batches() -> None:
    lengths = random_lengths(30)
    shares = [step[0] for step in plan_epoch(lengths, 200, 2, (0, 3))]
    samples, reader = make_samples(lengths), FakeReader(lengths)
    with BatchLoader(shares, samples, reader, torch.float32) as loader:
        whole = list(loader)
    with BatchLoader(shares[2:], samples, reader, torch.float32) as loader:
        rest = list(loader)
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.hidden_states, other.hidden_states)


def test_an_error_in_the_thread_reaches_the_trainer() -> None:
    lengths = random_lengths(10)
    shares = [[s] for s in lengths]
    reader = FakeReader(lengths, broken="prompt-4/0")
    with BatchLoader(shares, make_samples(lengths), reader, torch.float32) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        with pytest.raises(StoreError, match="prompt-4/0 is damaged"):
            next(batches)


def test_a_loader_that_is_left_early_ends_its_thread() -> None:
    lengths = random_lengths(30)
    loader = BatchLoader([[s] for s in lengths], make_samples(lengths), FakeReader(lengths), torch.float32)
    with loader:
        next(iter(loader))
    assert not loader._thread.is_alive()
