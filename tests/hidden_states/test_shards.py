"""Writer and reader: what is read is what was written, or an error; never anything else."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

from speculators.errors import MissingStageError, StoreError
from speculators.hidden_states.format import ERRORS, INDEX_FILE, SHARDS, Sidecar, token_checksum
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import Stage, StagePlan
from speculators.store import Store
from tests.conftest import ROOT

LAYERS, HIDDEN = [1, 2, 4], 8


def plan(dtype: str) -> StagePlan:
    return StagePlan(Stage.EXTRACT, {"layer_ids": LAYERS, "dtype": dtype})


def sample(number: int) -> tuple[str, torch.Tensor, list[int]]:
    """Deterministic content, so that another process can make the same."""
    generator = torch.Generator().manual_seed(number)
    tokens = 3 + number % 7
    states = torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator)
    return f"prompt-{number}/0", states, [number + t for t in range(tokens)]


def write(store: Store, stage: StagePlan, numbers: range, shard_bytes: int = 2000) -> None:
    dtype = stage.determinants["dtype"]
    with ShardWriter(store, stage.directory, LAYERS, dtype, shard_bytes, idle_flush_s=0.2) as writer:
        for number in numbers:
            sample_id, states, tokens = sample(number)
            writer.add(sample_id, states, token_checksum(tokens))


def sidecars(store: Store, stage: StagePlan) -> list[Sidecar]:
    paths = [path for path in store.list(stage.path(SHARDS)) if path.endswith(".json")]
    return [Sidecar.from_json(store.read_json(path)) for path in paths]


def finish(store: Store, stage: StagePlan) -> None:
    rows = [{"shard": s.shard, **entry.__dict__} for s in sidecars(store, stage) for entry in s.samples]
    buffer = io.BytesIO()
    pd.DataFrame(rows).to_parquet(buffer)
    store.write_bytes(stage.path(INDEX_FILE), buffer.getvalue())
    stage.complete(store, {INDEX_FILE: None}, {"hidden_size": HIDDEN})


@pytest.fixture(params=["local", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "store")
    return Store(f"s3://{request.getfixturevalue('s3_bucket')}/prefix", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_round_trip(any_store: Store, dtype: str) -> None:
    stage = plan(dtype)
    write(any_store, stage, range(30))
    finish(any_store, stage)
    reader = HiddenStateReader(any_store, stage)
    assert len(sidecars(any_store, stage)) > 3
    assert sorted(reader.sample_ids) == sorted(sample(n)[0] for n in range(30))
    assert reader.layer_ids == LAYERS
    for number in range(30):
        sample_id, states, tokens = sample(number)
        found = reader.read(sample_id)
        assert found.dtype == reader.dtype == getattr(torch, dtype)
        assert torch.equal(found, states.to(reader.dtype))
        assert reader.tokens(sample_id) == len(tokens)
        reader.check_tokens(sample_id, tokens)


def test_other_tokens_and_unknown_samples_are_errors(store: Store) -> None:
    stage = plan("float32")
    write(store, stage, range(3))
    finish(store, stage)
    reader = HiddenStateReader(store, stage)
    with pytest.raises(StoreError, match=r"prompt-1/0 are of other tokens"):
        reader.check_tokens("prompt-1/0", [9, 9, 9, 9])
    with pytest.raises(StoreError, match="no sample nobody"):
        reader.read("nobody")


def test_unfinished_sets_are_refused(store: Store) -> None:
    stage = plan("float32")
    write(store, stage, range(3))
    with pytest.raises(MissingStageError, match="generate-offline-data"):
        HiddenStateReader(store, stage)


def test_every_flipped_byte_is_found(store: Store) -> None:
    stage = plan("bfloat16")
    write(store, stage, range(8))
    finish(store, stage)
    reader = HiddenStateReader(store, stage)
    chance = random.Random(0)
    for sidecar in sidecars(store, stage):
        path = stage.path(sidecar.shard)
        whole = store.read_bytes(path)
        for entry in sidecar.samples:
            damaged = bytearray(whole)
            damaged[chance.randrange(entry.byte_start, entry.byte_end)] ^= 1 << chance.randrange(8)
            store.write_bytes(path, bytes(damaged))
            with pytest.raises(StoreError) as error:
                reader.read(entry.sample_id)
            assert entry.sample_id in str(error.value)
            assert sidecar.shard in str(error.value)
        store.write_bytes(path, whole[:-10])
        with pytest.raises(StoreError, match="damaged"):
            reader.read(sidecar.samples[-1].sample_id)
        store.write_bytes(path, whole)


def test_a_changed_index_is_refused(store: Store) -> None:
    stage = plan("float32")
    write(store, stage, range(3))
    finish(store, stage)
    store.write_bytes(stage.path(INDEX_FILE), store.read_bytes(stage.path(INDEX_FILE)) + b" ")
    with pytest.raises(StoreError, match="not the file that its manifest describes"):
        HiddenStateReader(store, stage)


def test_a_killed_writer_leaves_whole_shards_only(store: Store) -> None:
    """SIGKILL at ten moments; whatever a sidecar lists afterwards is right, and the rest is simply not there."""
    stage = plan("float32")
    code = textwrap.dedent(
        f"""
        import sys, time
        from speculators.store import Store
        from tests.hidden_states.test_shards import plan, write
        print("up", flush=True)
        while True:
            write(Store({store.url!r}), plan("float32"), range(40), shard_bytes=400)
        """
    )
    process = None
    for seed in range(10):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + 0.3 * random.Random(seed).random())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    entries = [(sidecar, entry) for sidecar in sidecars(store, stage) for entry in sidecar.samples]
    assert entries
    finish(store, stage)
    for sidecar, entry in entries:
        number = int(entry.sample_id.split("-")[1].split("/")[0])
        raw = store.read_range(stage.path(sidecar.shard), entry.byte_start, entry.byte_end)
        assert raw == sample(number)[1].numpy().tobytes()


class SlowStore(Store):
    """A store whose writes wait until they are let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()

    def write_bytes(self, path: str, data: bytes) -> None:
        self.gate.wait(30)
        super().write_bytes(path, data)


def test_a_slow_store_holds_the_producer_back(tmp_path: Path) -> None:
    store, stage = SlowStore(tmp_path / "store"), plan("float32")
    writer = ShardWriter(store, stage.directory, LAYERS, "float32", shard_bytes=2000, idle_flush_s=0.1)
    added: list[int] = []

    def produce() -> None:
        for number in range(60):
            sample_id, states, tokens = sample(number)
            writer.add(sample_id, states, token_checksum(tokens))
            added.append(states.numel() * 4)

    producer = threading.Thread(target=produce)
    producer.start()
    time.sleep(1)
    assert producer.is_alive()
    assert sum(added) <= 2 * 2000
    store.gate.set()
    producer.join(30)
    writer.close()
    assert sum(len(sidecar.samples) for sidecar in sidecars(store, stage)) == 60


class FullStore(Store):
    """A store that is full after a few writes."""

    def __init__(self, folder: Path, writes: int) -> None:
        super().__init__(folder)
        self.left = writes

    def write_bytes(self, path: str, data: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreError(f"Cannot write {path}: no space left.")
        super().write_bytes(path, data)


def test_a_full_store_is_reported_and_keeps_what_is_finished(tmp_path: Path) -> None:
    store, stage = FullStore(tmp_path / "store", 5), plan("float32")
    failures: list[BaseException] = []
    writer = ShardWriter(store, stage.directory, LAYERS, "float32", 2000, 0.1, on_failure=failures.append)
    with pytest.raises(StoreError, match="no space left"):  # noqa: PT012
        for number in range(200):
            sample_id, states, tokens = sample(number)
            writer.add(sample_id, states, token_checksum(tokens))
    with pytest.raises(StoreError, match="no space left"):
        writer.close()
    assert len(failures) == 1
    assert len(sidecars(store, stage)) == 2  # the third shard has no sidecar, so it does not count


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem of its own that holds little; skipped where none can be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_reported_and_leaves_no_half_file(small_disk: Path) -> None:
    """A real ENOSPC: what has a sidecar can be read, no temporary file takes space, and the next writer goes on."""
    store, stage = Store(small_disk / "store"), plan("float32")
    with pytest.raises(StoreError, match="no space left"):
        write(store, stage, range(400), shard_bytes=4000)
    folder = Path(store.full_path(stage.path(SHARDS)))
    assert not list(folder.glob(".*"))
    whole = sidecars(store, stage)
    assert whole
    for sidecar in whole:
        for entry in sidecar.samples:
            number = int(entry.sample_id.split("-")[1].split("/")[0])
            raw = store.read_range(stage.path(sidecar.shard), entry.byte_start, entry.byte_end)
            assert raw == sample(number)[1].numpy().tobytes()
    store.delete(stage.path(whole[0].shard))
    write(store, stage, range(3))
    assert len(sidecars(store, stage)) == len(whole) + 1


def test_a_writer_that_gives_up_notes_why(tmp_path: Path) -> None:
    """Shards cannot be written, other files can: whoever waits for the shards finds the reason in the store."""
    store, stage = Store(tmp_path / "store"), plan("float32")
    store.write_bytes(stage.path(SHARDS), b"a file where the folder should be")
    with pytest.raises(StoreError, match=SHARDS):
        write(store, stage, range(3))
    [marker] = store.list(stage.path(ERRORS))
    assert SHARDS in store.read_json(marker)["message"]
