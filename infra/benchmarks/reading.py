"""Hidden states in shards against one file per sample on S3, and the reader's rate against a plain sequential read.

Run it:  .venv/bin/python -m infra.benchmarks.reading [--mb 400] [--layers 4] [--hidden 576] [--tokens 100 500]

Uses the S3 server of AWS_ENDPOINT_URL, or starts SeaweedFS on this machine for as long as it runs. What is compared
takes turns, round by round; each ratio is that of the medians of one run. Samples are random numbers; the last layer is
kept from a third of the rows on. zstd saves a tenth of them as float8_e4m3, less than of real states.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from speculators.config import Compression, ExtractConfig, StateDtype
from speculators.hidden_states.format import (
    INDEX_FILE,
    SHARDS,
    EncodedStates,
    IndexEntry,
    Sidecar,
    StateFormat,
    shard_header,
    tensor_bytes,
    token_checksum,
)
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import Stage, StagePlan
from speculators.store import Store

DTYPES: tuple[StateDtype, ...] = ("float8_e4m3", "bfloat16")
COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd")
WRITE_THREADS = 2  # as many as ShardWriter has
MB = 1e6
_SERVER_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Shape:
    """What the samples look like."""

    layers: int
    hidden: int
    tokens: tuple[int, int]
    total_bytes: float


@dataclass(frozen=True)
class Samples:
    """Encoded samples by id, and how they are stored."""

    format: StateFormat
    hidden: int
    encoded: dict[str, EncodedStates]


@dataclass
class Cost:
    """What one piece of work took."""

    seconds: float
    requests: int


Costs = dict[str, list[Cost]]


class RequestCounter:
    """Counts HTTP requests to S3, repeated ones included."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        if not store.is_local:
            store.fs.connect()
            store.fs.s3.meta.events.register("before-send.s3", self._note)

    def _note(self, **event: Any) -> None:
        self.count += 1

    def measure(self, work: Callable[[], Any]) -> Cost:
        """Seconds and requests of some work."""
        before, started = self.count, time.perf_counter()
        work()
        return Cost(time.perf_counter() - started, self.count - before)


def main() -> None:
    """Run all comparisons and print their tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=400, help="bytes of all samples before compression, in MB")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, nargs=2, default=(100, 500), metavar=("LEAST", "MOST"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4, help="threads that read")
    parser.add_argument("--shard-mib", type=int, default=ExtractConfig().shard_mib)
    arguments = parser.parse_args()
    shape = Shape(arguments.layers, arguments.hidden, tuple(arguments.tokens), arguments.mb * MB)
    with tempfile.TemporaryDirectory(prefix="reading-") as name, s3_server(Path(name)) as server:
        folder = Path(name)
        print(f"{shape}, shards of {arguments.shard_mib} MiB, {arguments.threads} threads, {os.cpu_count()} cores,")
        print(f"S3: {server}, {'cold' if drop_page_cache() else 'warm'} page cache\n")
        run = Run(shape, arguments.rounds, arguments.threads, arguments.shard_mib << 20)
        with s3_store(folder / "cache") as remote:
            compare_files(run, remote)
            stores = {"S3": remote, "local folder": Store(folder / "store", cache_dir=folder / "cache")}
            compare_rates(run, stores)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Have the environment point to an S3 server; SeaweedFS, which ends with the context, where none is given."""
    if url := os.environ.get("AWS_ENDPOINT_URL"):
        yield url
        return
    port = free_port()
    keys = {"accessKey": "benchmark-key-id", "secretKey": "benchmark-secret-key"}
    identity = {"name": "benchmark", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID=keys["accessKey"],
        AWS_SECRET_ACCESS_KEY=keys["secretKey"],
        AWS_DEFAULT_REGION="us-east-1",
    )
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(weed_command(folder, port), stdout=log, stderr=log, cwd=folder)
    try:
        yield "SeaweedFS on this machine"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def weed_command(folder: Path, s3_port: int) -> list[str]:
    """SeaweedFS with all its parts in one process, reachable from this machine only."""
    services = ("master.port", "volume.port", "filer.port")
    ports = {name: free_port() for service in services for name in (service, f"{service}.grpc")}
    options = {
        **ports,
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 100,
        "volume.minFreeSpace": 1,
        "volume.preStopSeconds": 0,
        "s3.port": s3_port,
        "s3.port.grpc": free_port(),
        "s3.config": folder / "s3.json",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    weed = str(Path(sys.executable).with_name("weed"))
    return [weed, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_store(cache_dir: Path) -> Iterator[Store]:
    """A store in a bucket of its own, which is removed in the end."""
    store = Store(f"s3://reading-benchmark-{time.time_ns():x}/states", cache_dir)
    bucket, deadline = store.root.partition("/")[0], time.monotonic() + _SERVER_PATIENCE_S
    while True:
        try:
            with suppress(FileExistsError):
                store.fs.mkdir(bucket)
            store.fs.pipe_file(f"{bucket}/probe", b"ready")
            break
        except Exception:  # a server that has just started does not answer, or takes no data yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    try:
        yield store
    finally:
        store.fs.rm(bucket, recursive=True)


def drop_page_cache() -> bool:
    """Have the next reads come from the disk; False where that is not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


class Run:
    """What all comparisons of a run have in common.

    Args:
        shape: Of the samples.
        rounds: How often each case takes its turn.
        threads: How many read at once.
        shard_bytes: Target size of a shard.
    """

    def __init__(self, shape: Shape, rounds: int, threads: int, shard_bytes: int) -> None:
        self.shape, self.rounds, self.threads, self.shard_bytes = shape, rounds, threads, shard_bytes

    def samples(self, dtype: StateDtype, compression: Compression) -> Samples:
        """Random samples, the same in every run; channels differ in size, as they do in real states."""
        layer_ids = tuple(range(1, self.shape.layers + 1))
        format = StateFormat(layer_ids, dtype, dtype, compression)
        generator, chance = torch.Generator().manual_seed(0), random.Random(0)
        channels = torch.randn(self.shape.hidden, generator=generator).exp()
        encoded: dict[str, EncodedStates] = {}
        size = 0
        while size < self.shape.total_bytes:
            rows = chance.randint(*self.shape.tokens) - 1
            states = channels * torch.randn(rows, self.shape.layers, self.shape.hidden, generator=generator)
            sample = format.encode(states, rows // 3)
            encoded[f"prompt-{len(encoded)}/0"] = sample
            size += sample.nbytes
        return Samples(format, self.shape.hidden, encoded)

    def write_shards(self, store: Store, plan: StagePlan, samples: Samples) -> None:
        """A finished set, as an extraction leaves it."""
        with ShardWriter(store, plan.directory, samples.format, self.shard_bytes) as writer:
            for sample_id, encoded in samples.encoded.items():
                writer.add(sample_id, encoded, token_checksum(range(encoded.rows)))
        sidecars = [
            Sidecar.from_json(store.read_json(path)) for path in store.list(plan.path(SHARDS)) if path.endswith(".json")
        ]
        index = [
            asdict(IndexEntry(shard=sidecar.shard, **asdict(entry)))
            for sidecar in sidecars
            for entry in sidecar.samples
        ]
        buffer = io.BytesIO()
        pd.DataFrame(index).to_parquet(buffer, index=False)
        store.write_bytes(plan.path(INDEX_FILE), buffer.getvalue())
        files = {INDEX_FILE: None, **{sidecar.shard: sidecar.sha256 for sidecar in sidecars}}
        plan.complete(store, files, {"hidden_size": samples.hidden})

    def read_shards(self, reader: HiddenStateReader, seed: int) -> None:
        """All samples in an order that differs from seed to seed, decoded."""
        self._read(reader.sample_ids, reader.read, seed)

    def read_files(self, store: Store, plan: StagePlan, samples: Samples, seed: int) -> None:
        """The same of one file per sample."""

        def read(sample_id: str) -> Tensor:
            data, encoded = store.read_bytes(file_of(plan, sample_id)), samples.encoded[sample_id]
            start = 8 + int.from_bytes(data[:8], "little")
            unpacked = samples.format.unpack(data[start:], encoded.rows, encoded.last_from, samples.hidden)
            return samples.format.decode(unpacked)

        self._read(list(samples.encoded), read, seed)

    def _read(self, sample_ids: Sequence[str], read: Callable[[str], Tensor], seed: int) -> None:
        order = random.Random(seed).sample(sample_ids, len(sample_ids))
        with ThreadPoolExecutor(self.threads) as pool:
            # Lengths only: the results of all samples would take the memory of several sets.
            assert sum(pool.map(lambda sample_id: len(read(sample_id)), order)) > 0


def write_files(store: Store, plan: StagePlan, samples: Samples) -> None:
    """A safetensors file for each sample."""

    def write(sample_id: str) -> None:
        packed = samples.format.pack(samples.encoded[sample_id])
        store.write_bytes(
            file_of(plan, sample_id), b"".join([shard_header([packed]), *map(tensor_bytes, packed.values())])
        )

    with ThreadPoolExecutor(WRITE_THREADS) as pool:
        list(pool.map(write, samples.encoded))


def file_of(plan: StagePlan, sample_id: str) -> str:
    """Path of the file that holds one sample."""
    return plan.path(f"files/{sample_id}.safetensors")


def read_plainly(store: Store, plan: StagePlan) -> None:
    """All bytes of the shards, one file after another; nothing is done with them."""
    for path in store.list(plan.path(SHARDS)):
        if not path.endswith(".safetensors"):
            continue
        if store.is_local:
            with open(store.full_path(path), "rb") as file:
                file.read()
        else:
            store.fs.cat_file(store.full_path(path))


def open_plan(samples: Samples, purpose: str) -> StagePlan:
    """An extraction that nothing else knows."""
    return StagePlan(Stage.EXTRACT, {"benchmark": purpose, "states": samples.format.to_json()})


def compare_files(run: Run, store: Store) -> None:
    """Shards against one file per sample: seconds and requests."""
    samples, counter = run.samples(DTYPES[0], COMPRESSIONS[0]), RequestCounter(store)
    works = ("write", "read, first epoch", "read, second epoch")
    shards: Costs = {work: [] for work in works}
    files: Costs = {work: [] for work in works}
    for number in range(run.rounds):
        plan = open_plan(samples, f"files {number}")
        shards[works[0]].append(counter.measure(lambda: run.write_shards(store, plan, samples)))  # noqa: B023
        files[works[0]].append(counter.measure(lambda: write_files(store, plan, samples)))  # noqa: B023
        reader = HiddenStateReader.open(store, plan)
        for epoch, work in enumerate(works[1:]):
            drop_page_cache()
            shards[work].append(counter.measure(lambda: run.read_shards(reader, epoch)))  # noqa: B023
            drop_page_cache()
            files[work].append(counter.measure(lambda: run.read_files(store, plan, samples, epoch)))  # noqa: B023
        store.delete(plan.directory)
        shutil.rmtree(store.cache_dir)
    report_files(samples, shards, files)


def report_files(samples: Samples, shards: Costs, files: Costs) -> None:
    """Print what :func:`compare_files` measured."""
    print(
        f"{len(samples.encoded)} samples, {stored_mb(samples):.0f} MB as {samples.format.dtype}, on S3; files have no"
    )
    print("cache, no checksums and no index. Seconds: median (each round).\n")
    print_row("Work", "Requests, files", "Requests, shards", "Fewer", "Seconds, files", "Seconds, shards", "Faster")
    print_row(*["---"] * 7)
    for work in shards:
        requests = [max(cost.requests for cost in costs[work]) for costs in (files, shards)]
        seconds = [[cost.seconds for cost in costs[work]] for costs in (files, shards)]
        fewer = f"{requests[0] / requests[1]:.1f} times" if requests[1] else "none left"
        faster = statistics.median(seconds[0]) / statistics.median(seconds[1])
        print_row(work, *requests, fewer, *map(with_rounds, seconds), f"{faster:.2f} times")
    print()


def compare_rates(run: Run, stores: dict[str, Store]) -> None:
    """The reader's rate against that of a plain read of the same files."""
    print("MB/s of stored bytes: median (each round).\n")
    print_row("Store", "dtype", "Compression", "MB", "Plain", "Reader", "Reader / plain", "Reader, second epoch")
    print_row(*["---"] * 8)
    for dtype in DTYPES:
        for compression in COMPRESSIONS:
            samples = run.samples(dtype, compression)
            for name, store in stores.items():
                measure_rates(run, name, store, samples)


def measure_rates(run: Run, name: str, store: Store, samples: Samples) -> None:
    """Print the row of one store and format."""
    plan = open_plan(samples, "rates")
    run.write_shards(store, plan, samples)
    plain: list[float] = []
    epochs: tuple[list[float], list[float]] = [], []
    counter = RequestCounter(store)
    for _ in range(run.rounds):
        reader = HiddenStateReader.open(store, plan)
        drop_page_cache()
        plain.append(counter.measure(lambda: read_plainly(store, plan)).seconds)
        for epoch, seconds in enumerate(epochs):
            if epoch == 0:
                drop_page_cache()
            seconds.append(counter.measure(lambda: run.read_shards(reader, epoch)).seconds)  # noqa: B023
        shutil.rmtree(store.cache_dir, ignore_errors=True)
    size = sum(store.size(path) for path in store.list(plan.path(SHARDS)) if path.endswith(".safetensors")) / MB
    store.delete(plan.directory)
    rates = [[size / value for value in seconds] for seconds in (plain, *epochs)]
    ratio = statistics.median(rates[1]) / statistics.median(rates[0])
    first, second, third = (with_rounds(rate, 0) for rate in rates)
    print_row(
        name, *(samples.format.dtype, samples.format.compression), f"{size:.0f}", first, second, f"{ratio:.2f}", third
    )


def stored_mb(samples: Samples) -> float:
    """Size before compression."""
    return sum(encoded.nbytes for encoded in samples.encoded.values()) / MB


def with_rounds(values: Sequence[float], digits: int = 2) -> str:
    """The median, and in brackets what it is the median of."""
    return f"{statistics.median(values):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in values)})"


def print_row(*cells: Any) -> None:
    """A row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
