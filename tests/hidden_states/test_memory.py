"""Memory of writer and reader over ten thousand samples: bounded, and the same at the end as soon after the start.

Each measurement has a process of its own, so that pytest's memory does not matter.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from speculators.hidden_states.format import EncodedStates, IndexEntry, token_checksum
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import StagePlan
from speculators.store import Store
from tests.hidden_states.test_shards import LAYERS, format_of, plan, sidecars

SAMPLES, EVERY, ROWS, HIDDEN = 10_000, 500, 40, 64
SHARD_BYTES = 1 << 20
HELD_SHARDS = 3
# A leak of each sample's stored bytes would add 59 MiB from the first quarter to the end.
MOST_GROWTH = 4 << 20


class SlowStore(Store):
    """A store that takes longer for a shard than the producer does."""

    def write_pieces(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        if path.endswith(".safetensors"):
            time.sleep(0.05)
        super().write_pieces(path, pieces)


class LeakingWriter(ShardWriter):
    """Keeps every sample."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.kept: list[EncodedStates] = []

    def add(self, sample_id: str, states: EncodedStates, token_crc32: int) -> None:
        super().add(sample_id, states, token_crc32)
        self.kept.append(states)


class LeakingReader(HiddenStateReader):
    """Keeps of every sample as many bytes as are stored."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.kept: list[Tensor] = []

    def read(self, sample_id: str) -> Tensor:
        states = super().read(sample_id)
        self.kept.append(states.to(torch.float8_e4m3fn))
        return states


class Alive:
    """Counts the bytes of samples that something still refers to."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def watch(self, sample: EncodedStates) -> None:
        """Count a sample until it is freed."""
        self._change(sample.nbytes)
        weakref.finalize(sample, self._change, -sample.nbytes)

    def _change(self, size: int) -> None:
        with self._lock:
            self.now += size
            self.most = max(self.most, self.now)


def stage() -> StagePlan:
    return plan("float8_e4m3")


def own_memory() -> int:
    """RSS of this process without pages of files: the kernel gives and takes those as it likes."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def release_free_memory() -> None:
    """Give back what imports have freed, or it would hide the first part of a leak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def write_all(folder: Path, writer_class: type[ShardWriter]) -> tuple[list[int], int]:
    """Write all samples; memory after every 500, and the most bytes of samples that were alive at once."""
    store, alive, memory = SlowStore(folder), Alive(), []
    template = format_of(stage()).encode(torch.randn(ROWS, len(LAYERS), HIDDEN), 0)
    release_free_memory()
    with writer_class(store, stage().directory, format_of(stage()), SHARD_BYTES) as writer:
        for number in range(SAMPLES):
            encoded = replace(template, tensors={name: t.clone() for name, t in template.tensors.items()})
            alive.watch(encoded)
            writer.add(f"prompt-{number}/0", encoded, token_checksum(range(ROWS)))
            if (number + 1) % EVERY == 0:
                memory.append(own_memory())
    return memory, alive.most


def read_all(folder: Path, reader_class: type[HiddenStateReader]) -> list[int]:
    """Read all samples in another order than they were written, with four threads; memory after every 500."""
    store, memory = Store(folder), []
    entries = [IndexEntry(shard=s.shard, **asdict(entry)) for s in sidecars(store, stage()) for entry in s.samples]
    reader = reader_class(store, stage().directory, format_of(stage()), HIDDEN, entries)
    order = random.Random(0).sample(reader.sample_ids, SAMPLES)
    release_free_memory()
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, SAMPLES, EVERY):
            shapes = pool.map(lambda sample_id: reader.read(sample_id).shape, order[start : start + EVERY])
            assert set(shapes) == {(ROWS, len(LAYERS), HIDDEN)}
            memory.append(own_memory())
    return memory


def growth(memory: list[int]) -> int:
    """By how much the most memory after the first quarter exceeds that of the first quarter."""
    quarter = len(memory) // 4
    return max(memory[quarter:]) - max(memory[:quarter])


@pytest.fixture
def child() -> ProcessPoolExecutor:
    """Runs each function in a new process."""
    return ProcessPoolExecutor(max_workers=1, max_tasks_per_child=1, mp_context=multiprocessing.get_context("spawn"))


def test_memory_is_bounded_and_flat(tmp_path: Path, child: ProcessPoolExecutor) -> None:
    with child:
        writing, held = child.submit(write_all, tmp_path, ShardWriter).result()
        print(f"writing grew by {growth(writing) / 2**20:.2f} MiB, {held / SHARD_BYTES:.2f} shards held")
        reading = child.submit(read_all, tmp_path, HiddenStateReader).result()
        print(f"reading grew by {growth(reading) / 2**20:.2f} MiB")
    assert growth(writing) < MOST_GROWTH
    assert growth(reading) < MOST_GROWTH
    in_hand = ROWS * sum(format_of(stage()).row_bytes(HIDDEN))  # the producer's, which waits for room
    assert 2 * SHARD_BYTES < held <= HELD_SHARDS * SHARD_BYTES + in_hand


def test_a_leak_would_be_found(tmp_path: Path, child: ProcessPoolExecutor) -> None:
    """What the test above allows is far from what it is to find."""
    with child:
        writing, held = child.submit(write_all, tmp_path, LeakingWriter).result()
        print(f"writing grew by {growth(writing) / 2**20:.2f} MiB, {held / SHARD_BYTES:.2f} shards held")
        reading = child.submit(read_all, tmp_path, LeakingReader).result()
        print(f"reading grew by {growth(reading) / 2**20:.2f} MiB")
    assert growth(writing) > MOST_GROWTH
    assert growth(reading) > MOST_GROWTH
    assert held > HELD_SHARDS * SHARD_BYTES
