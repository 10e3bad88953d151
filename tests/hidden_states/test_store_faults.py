"""An S3 endpoint that fails in every way: no wrong tensor is ever read, what was finished stays, a rerun completes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
import torch

from speculators.errors import StoreError
from speculators.hidden_states import writer as writer_module
from speculators.hidden_states.format import SHARDS
from speculators.hidden_states.reader import HiddenStateReader
from speculators.manifest import StagePlan
from speculators.store import Store
from tests.conftest import s3_environment
from tests.faulty_s3 import FaultyS3
from tests.hidden_states.test_shards import add, check_entry, finish, format_of, kept, number_of, plan, sample, sidecars
from tests.hidden_states.test_shards import write as write_samples

SEEDS = 20
COUNT = 40


@pytest.fixture
def proxy(s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Stands between the store and the S3 server."""
    with FaultyS3(s3_endpoint) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        monkeypatch.setattr(writer_module, "_FIRST_DELAY_S", 0.05)
        s3fs.S3FileSystem.clear_instance_cache()
        yield faulty


@pytest.fixture
def remote(proxy: FaultyS3, s3_bucket: str, tmp_path: Path) -> Store:
    return Store(f"s3://{s3_bucket}/prefix", cache_dir=tmp_path / "cache")


def write(store: Store, stage: StagePlan, shard_bytes: int = 1500) -> None:
    write_samples(store, stage, range(COUNT), shard_bytes)


def check_all(store: Store, stage: StagePlan) -> None:
    """Every sample is read as it was written."""
    reader = HiddenStateReader.open(store, stage)
    assert sorted(map(number_of, reader.sample_ids)) == list(range(COUNT))
    for sample_id in reader.sample_ids:
        assert torch.equal(reader.read(sample_id), kept(number_of(sample_id)))


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        ("reset", 6),
        ("reset_after", 6),
        ("error_500", 4),
        ("slow_down", 4),
        ("truncate_upload", 3),
        ("delay", 4),
        ("throttle", None),
    ],
)
def test_a_writer_gets_over_what_passes(proxy: FaultyS3, remote: Store, fault: str, times: int | None) -> None:
    stage = plan("float32")
    proxy.delay_s, proxy.bytes_per_s = 0.3, 50_000
    proxy.inject(fault, methods={"PUT"}, match=f"/{SHARDS}/", times=times)
    write(remote, stage)
    assert proxy.injected[fault] >= (times or 1)
    proxy.clear()
    finish(remote, stage)
    check_all(remote, stage)


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        ("reset", 3),
        ("reset_after", 3),
        ("error_500", 3),
        ("slow_down", 3),
        ("truncate_response", 3),
        ("flip_byte", 2),
        ("delay", 3),
    ],
)
def test_a_reader_gets_over_what_passes(proxy: FaultyS3, remote: Store, fault: str, times: int) -> None:
    stage = plan("float32")
    write(remote, stage)
    finish(remote, stage)
    proxy.delay_s = 0.3
    proxy.inject(fault, methods={"GET"}, match=f"/{SHARDS}/", times=times)
    check_all(remote, stage)
    assert proxy.injected[fault] == times


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_all_faults_at_once(proxy: FaultyS3, remote: Store, seed: int) -> None:
    stage = plan("float32")
    faults = ("reset", "reset_after", "error_500", "slow_down", "truncate_upload", "truncate_response")
    for number, fault in enumerate(faults):
        proxy.inject(fault, match=f"/{SHARDS}/", probability=0.05, seed=10 * seed + number)
    write(remote, stage, shard_bytes=500)
    assert sum(proxy.injected.values()) > 5
    finish(remote, stage)
    check_all(remote, stage)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("expired", "the credentials have expired"),
        ("skewed", "this machine's clock is off"),
        ("denied", "permission denied"),
    ],
)
def test_what_does_not_pass_is_said_and_a_rerun_completes(
    proxy: FaultyS3, remote: Store, fault: str, message: str
) -> None:
    """After some shards the store refuses: the error says why, finished shards stay, the next run adds the rest."""
    stage = plan("float32")
    writer = writer_module.ShardWriter(remote, stage.directory, format_of(stage), 1500, 0.1)
    with pytest.raises(StoreError, match=message):  # noqa: PT012
        for number in range(COUNT):
            if number == COUNT // 2:
                time.sleep(0.5)  # until the first ones are written
                proxy.inject(fault, methods={"PUT"})
            add(writer, number, stage)
        writer.close()
    proxy.clear()
    finished = {entry.sample_id for sidecar in sidecars(remote, stage) for entry in sidecar.samples}
    assert 0 < len(finished) < COUNT
    with writer_module.ShardWriter(remote, stage.directory, format_of(stage), 1500, 0.1) as writer:
        for number in range(COUNT):
            if sample(number)[0] not in finished:
                add(writer, number, stage)
    finish(remote, stage)
    check_all(remote, stage)


def test_a_reader_is_told_why_it_cannot_read(proxy: FaultyS3, remote: Store) -> None:
    stage = plan("float32")
    write(remote, stage)
    finish(remote, stage)
    for fault, message in (("expired", "have expired"), ("denied", "permission denied"), ("flip_byte", "is damaged")):
        proxy.inject(fault, methods={"GET"}, match=f"/{SHARDS}/")
        with pytest.raises(StoreError, match=message):
            check_all(remote, stage)
        proxy.clear()
    check_all(remote, stage)


def test_a_store_that_stays_away_is_an_error_in_the_end(proxy: FaultyS3, remote: Store) -> None:
    stage = plan("float32")
    proxy.inject("error_500", methods={"PUT"})
    writer = writer_module.ShardWriter(remote, stage.directory, format_of(stage), 1500, 0.1, patience_s=1.0)
    with pytest.raises(StoreError, match=SHARDS):  # noqa: PT012
        for number in range(COUNT):
            add(writer, number, stage)
        writer.close()
    assert not sidecars(remote, stage)


def test_uploads_that_were_begun_and_left_are_given_up(remote: Store, s3_bucket: str) -> None:
    stage = plan("float32")
    others = [f"prefix/{stage.path(SHARDS)}/x.safetensors", "prefix/elsewhere/y"]
    for key in others:
        remote.fs.call_s3("create_multipart_upload", Bucket=s3_bucket, Key=key)
    assert len(remote.fs.list_multipart_uploads(s3_bucket)) == 2
    remote.abort_uploads(stage.path(SHARDS))
    assert [upload["Key"] for upload in remote.fs.list_multipart_uploads(s3_bucket)] == others[1:]


def test_a_large_shard_goes_up_in_parts_and_not_at_all_when_it_breaks(proxy: FaultyS3, remote: Store) -> None:
    pieces = [bytes([n]) * (5 << 20) for n in range(8)]
    remote.write_pieces("large", pieces)
    assert proxy.counts["POST"] == 2, "begun and completed once"
    assert remote.read_bytes("large") == b"".join(pieces)
    proxy.inject("denied", methods={"PUT"}, match="partNumber=2")
    with pytest.raises(StoreError, match="permission denied"):
        remote.write_pieces("broken", pieces)
    assert not remote.exists("broken")
    assert not remote.fs.list_multipart_uploads(remote.root.split("/")[0])


# --- processes that are killed --------------------------------------------------------------------------------------


def _write_for_ever(url: str, environment: dict[str, str], started: multiprocessing.synchronize.Event) -> None:
    os.environ.update(environment)
    store = Store(url)
    started.set()
    while True:
        write_samples(store, plan("float32"), range(COUNT), shard_bytes=400)


def _read_for_ever(
    url: str, cache: Path, environment: dict[str, str], started: multiprocessing.synchronize.Event
) -> None:
    os.environ.update(environment)
    started.set()
    while True:
        check_all(Store(url, cache_dir=cache), plan("float32"))


def killed(target: object, arguments: tuple[object, ...], seed: int) -> None:
    """Run a function in a process and kill that at a moment that the seed determines."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    started = context.Event()
    process = context.Process(target=target, args=(*arguments, started))  # type: ignore[arg-type]
    process.start()
    assert started.wait(120)
    time.sleep(0.6 * random.Random(seed).random())
    assert process.is_alive(), "it ended by itself"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_killed_writers_leave_whole_shards_only(
    kind: str, tmp_path: Path, s3_endpoint: str, request: pytest.FixtureRequest
) -> None:
    """SIGKILL at 20 moments; whatever a sidecar lists afterwards is right, and the rest is simply not there."""
    url = str(tmp_path / "store") if kind == "local" else f"s3://{request.getfixturevalue('s3_bucket')}/prefix"
    store, stage = Store(url), plan("float32")
    for seed in range(SEEDS):
        killed(_write_for_ever, (url, s3_environment(s3_endpoint)), seed)
    entries = [(sidecar, entry) for sidecar in sidecars(store, stage) for entry in sidecar.samples]
    assert entries
    for sidecar, entry in entries:
        check_entry(store, stage, sidecar, entry)


def test_killed_readers_leave_a_cache_that_is_right(s3_endpoint: str, s3_bucket: str, tmp_path: Path) -> None:
    """SIGKILL at 20 moments of a reader that fills its cache; what the next one reads is right, from there or not."""
    url, cache, stage = f"s3://{s3_bucket}/prefix", tmp_path / "cache", plan("float32")
    store = Store(url, cache_dir=cache)
    write_samples(store, stage, range(COUNT), shard_bytes=400)
    finish(store, stage)
    for seed in range(SEEDS):
        killed(_read_for_ever, (url, cache, s3_environment(s3_endpoint)), seed)
    check_all(store, stage)
