"""Writer and reader: what is read is what was written, or an error; never anything else."""

from __future__ import annotations

import io
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from speculators.errors import MissingStageError, StoreError
from speculators.hidden_states.format import (
    ERRORS,
    INDEX_FILE,
    SHARDS,
    EncodedStates,
    SampleEntry,
    Sidecar,
    StateFormat,
    tensor_bytes,
    token_checksum,
)
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import Stage, StagePlan
from speculators.store import Store
from tests.conftest import make_bucket

LAYERS, HIDDEN = [1, 2, 4], 8


def plan(dtype: str, compression: str = "none", last_dtype: str | None = None) -> StagePlan:
    states = StateFormat(tuple(LAYERS), dtype, last_dtype or dtype, compression)  # type: ignore[arg-type]
    return StagePlan(Stage.EXTRACT, {"states": states.to_json()})


def format_of(stage: StagePlan) -> StateFormat:
    return StateFormat.from_json(stage.determinants["states"])


def sample(number: int) -> tuple[str, torch.Tensor, list[int]]:
    """Deterministic content, so that another process can make the same: states [n - 1, layers, H] of n tokens."""
    generator = torch.Generator().manual_seed(number)
    tokens = 3 + number % 7
    states = torch.randn(tokens - 1, len(LAYERS), HIDDEN, generator=generator)
    return f"prompt-{number}/0", states, [number + t for t in range(tokens)]


def first_last(number: int) -> int:
    """First row of a sample whose last layer is stored."""
    return number % 2


def add(writer: ShardWriter, number: int, stage: StagePlan) -> EncodedStates:
    sample_id, states, tokens = sample(number)
    encoded = format_of(stage).encode(states, first_last(number))
    writer.add(sample_id, encoded, token_checksum(tokens[:-1]))
    return encoded


def kept(number: int) -> torch.Tensor:
    """What can be read back of a sample that is stored exactly."""
    states = sample(number)[1].clone()
    states[: first_last(number), -1] = 0
    return states


def number_of(sample_id: str) -> int:
    return int(sample_id.split("-")[1].split("/")[0])


def check_entry(store: Store, stage: StagePlan, sidecar: Sidecar, entry: SampleEntry) -> None:
    raw = store.read_range(stage.path(sidecar.shard), entry.byte_start, entry.byte_end)
    found = sidecar.format.decode(sidecar.format.unpack(raw, entry.rows, entry.last_from, HIDDEN))
    assert torch.equal(found, kept(number_of(entry.sample_id)))


def write(store: Store, stage: StagePlan, numbers: range, shard_bytes: int = 2000) -> None:
    with ShardWriter(store, stage.directory, format_of(stage), shard_bytes, idle_flush_s=0.2) as writer:
        for number in numbers:
            add(writer, number, stage)


def sidecars(store: Store, stage: StagePlan) -> list[Sidecar]:
    paths = [path for path in store.list(stage.path(SHARDS)) if path.endswith(".json")]
    return [Sidecar.from_json(store.read_json(path)) for path in paths]


def finish(store: Store, stage: StagePlan) -> None:
    rows = [{"shard": s.shard, **entry.__dict__} for s in sidecars(store, stage) for entry in s.samples]
    buffer = io.BytesIO()
    pd.DataFrame(rows).to_parquet(buffer)
    store.write_bytes(stage.path(INDEX_FILE), buffer.getvalue())
    stage.complete(store, {INDEX_FILE: None}, {"hidden_size": HIDDEN})


@pytest.fixture(params=["local", "s3", "seaweedfs"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        return Store(tmp_path / "store")
    bucket = make_bucket(request.getfixturevalue(f"{request.param}_endpoint"), monkeypatch)
    return Store(f"s3://{bucket}/prefix", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize(
    ("dtype", "last_dtype", "tolerances"),
    [
        ("float32", "float32", (0, 0)),
        ("bfloat16", "bfloat16", (2**-8, 2**-8)),
        ("float8_e4m3", "float8_e4m3", (2**-4, 2**-4)),
        ("float8_e4m3", "bfloat16", (2**-4, 2**-8)),
    ],
)
def test_round_trip(
    any_store: Store, dtype: str, last_dtype: str, tolerances: tuple[float, float], compression: str
) -> None:
    """Every value is off by no more than half of its dtype's step: 2**-4 for three bits of mantissa."""
    stage = plan(dtype, compression, last_dtype)
    write(any_store, stage, range(30), shard_bytes=700)
    finish(any_store, stage)
    reader = HiddenStateReader.open(any_store, stage)
    assert len(sidecars(any_store, stage)) > 3
    assert sorted(reader.sample_ids) == sorted(sample(n)[0] for n in range(30))
    assert reader.layer_ids == LAYERS
    for number in range(30):
        sample_id, _, tokens = sample(number)
        found, expected = reader.read(sample_id), kept(number)
        assert found.dtype == torch.float32
        for group, tolerance in zip((slice(None, -1), slice(-1, None)), tolerances, strict=True):
            mine, true = found[:, group], expected[:, group]
            # Below the smallest normal number of float8 the step is the same for all.
            floor = true.abs().amax(dim=-1, keepdim=True) / 448 * 2**-10 * (tolerance > 2**-8)
            assert bool(((mine - true).abs() <= true.abs() * tolerance + floor).all())
        reader.check_tokens(sample_id, tokens)


def test_a_shard_is_a_safetensors_file(store: Store) -> None:
    """Whoever has only safetensors can read it; each sample's tensors are one range without gaps."""
    stage = plan("float8_e4m3", last_dtype="bfloat16")
    write(store, stage, range(12), shard_bytes=1500)
    for sidecar in sidecars(store, stage):
        tensors = load_file(store.full_path(stage.path(sidecar.shard)))
        assert len(tensors) == 4 * len(sidecar.samples) - len(sidecar.samples)
        for place, entry in enumerate(sidecar.samples):
            states = sample(number_of(entry.sample_id))[1]
            scale = tensors[f"{place}.aux_scale"]
            assert torch.allclose(scale, states[:, :-1].abs().amax(dim=-1) / 448)
            decoded = tensors[f"{place}.aux"].float() * scale[..., None]
            assert torch.allclose(decoded, states[:, :-1], rtol=2**-4, atol=1e-4)
            assert torch.equal(tensors[f"{place}.last"], states[entry.last_from :, -1].bfloat16())
            mine = [tensors[f"{place}.{name}"] for name in ("aux_scale", "aux", "last")]
            assert entry.byte_end - entry.byte_start == sum(t.numel() * t.element_size() for t in mine)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_states_that_float8_has_trouble_with(compression: str) -> None:
    """Rows of zeros, of one huge value among small ones, of tiny ones, and what is not finite."""
    states = torch.zeros(6, 2, 16)
    states[1, 0, 3], states[1, 0, 4] = 1e6, 100.0
    states[2, 0] = 1e-30
    states[3, 0, 0] = float("nan")
    states[4, 0, 0] = float("inf")
    states[5, 0] = -(2.0**100)
    format = StateFormat((1, 2), "float8_e4m3", "float8_e4m3", compression)  # type: ignore[arg-type]
    packed = b"".join(bytes(tensor_bytes(t)) for t in format.pack(format.encode(states, 0)).values())
    found = format.decode(format.unpack(packed, 6, 0, 16))
    assert torch.equal(found[0], states[0])
    assert torch.allclose(found[[1, 2, 5]], states[[1, 2, 5]], rtol=2**-4, atol=1e-32)
    assert not found[3, 0].isfinite().all()
    assert not found[4, 0].isfinite().all()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["float8_e4m3", "bfloat16", "float32"])
@pytest.mark.parametrize(("layers", "last_from"), [((4,), 0), ((1, 4), 5)])
def test_groups_without_values(dtype: str, compression: str, layers: tuple[int, ...], last_from: int) -> None:
    """No auxiliary layers (an MTP head's), or no row of the last one."""
    states_format = StateFormat(layers, dtype, dtype, compression)  # type: ignore[arg-type]
    encoded = states_format.encode(torch.randn(5, len(layers), 8), last_from)
    packed = b"".join(bytes(tensor_bytes(t)) for t in states_format.pack(encoded).values())
    found = states_format.unpack(packed, 5, last_from, 8)
    assert all(torch.equal(found.tensors[name].float(), encoded.tensors[name].float()) for name in encoded.tensors)
    assert states_format.decode(found).shape == (5, len(layers), 8)


def test_other_tokens_and_unknown_samples_are_errors(store: Store) -> None:
    stage = plan("float32")
    write(store, stage, range(3))
    finish(store, stage)
    reader = HiddenStateReader.open(store, stage)
    with pytest.raises(StoreError, match=r"prompt-1/0 are of other tokens"):
        reader.check_tokens("prompt-1/0", [9, 9, 9, 9])
    with pytest.raises(StoreError, match="no sample nobody"):
        reader.read("nobody")


def test_unfinished_sets_are_refused(store: Store) -> None:
    stage = plan("float32")
    write(store, stage, range(3))
    with pytest.raises(MissingStageError, match="generate-offline-data"):
        HiddenStateReader.open(store, stage)


def test_every_flipped_byte_is_found(store: Store) -> None:
    stage = plan("bfloat16")
    write(store, stage, range(8))
    finish(store, stage)
    reader = HiddenStateReader.open(store, stage)
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
        HiddenStateReader.open(store, stage)


class SlowStore(Store):
    """A store whose writes wait until they are let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()

    def write_pieces(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        self.gate.wait(30)
        super().write_pieces(path, pieces)


def test_a_slow_store_holds_the_producer_back(tmp_path: Path) -> None:
    store, stage = SlowStore(tmp_path / "store"), plan("float32")
    writer = ShardWriter(store, stage.directory, format_of(stage), shard_bytes=2000, idle_flush_s=0.1)
    added: list[int] = []

    def produce() -> None:
        for number in range(60):
            added.append(add(writer, number, stage).nbytes)

    producer = threading.Thread(target=produce)
    producer.start()
    time.sleep(1)
    assert producer.is_alive()
    assert 2000 < sum(added) <= 3 * 2000
    assert not writer.has_room(2000)
    store.gate.set()
    producer.join(30)
    writer.close()
    assert sum(len(sidecar.samples) for sidecar in sidecars(store, stage)) == 60


class FullStore(Store):
    """A store that has room for a few shards."""

    def __init__(self, folder: Path, shards: int) -> None:
        super().__init__(folder)
        self.left = shards

    def write_pieces(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        self.left -= path.endswith(".safetensors")
        if self.left < 0:
            raise StoreError(f"Cannot write {path}: no space left.")
        super().write_pieces(path, pieces)


def test_a_full_store_is_reported_and_keeps_what_is_finished(tmp_path: Path) -> None:
    store, stage = FullStore(tmp_path / "store", 2), plan("float32")
    failures: list[BaseException] = []
    writer = ShardWriter(store, stage.directory, format_of(stage), 2000, 0.1, on_failure=failures.append)
    with pytest.raises(StoreError, match="no space left"):  # noqa: PT012
        for number in range(200):
            add(writer, number, stage)
    with pytest.raises(StoreError, match="no space left"):
        writer.close()
    assert len(failures) == 1
    assert len(sidecars(store, stage)) == 2


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
            check_entry(store, stage, sidecar, entry)
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
