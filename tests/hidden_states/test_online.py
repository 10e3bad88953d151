"""Training on states that vLLM makes meanwhile: several real servers, one that dies, and the results of offline."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from speculators import stages
from speculators.data.prepare import Sample, load_samples
from speculators.errors import ServingError
from speculators.hidden_states.capture import Capture, online_directory
from speculators.hidden_states.extract import finish_set
from speculators.hidden_states.format import StateFormat, read_sample_file, token_checksum
from speculators.hidden_states.online import HybridStates, OnlineStates
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.writer import ShardWriter
from speculators.progress import TerminalProgress
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store


def test_a_file_that_describes_itself(store: Store) -> None:
    """What is damaged anywhere is refused."""
    states_format = StateFormat((1, 2), "bfloat16", "float8_e4m3")
    states = torch.randn(5, 2, 16)
    with ShardWriter(store, "online/x", states_format, 1 << 20, one_file_each=True) as writer:
        writer.add("job-1", states_format.encode(states, 2), token_checksum([1, 2, 3, 4, 5]))
    data = store.read_bytes("online/x/job-1.safetensors")
    entry, found = read_sample_file(data, states_format, 16)
    assert (entry.sample_id, entry.rows, entry.last_from) == ("job-1", 5, 2)
    assert entry.token_crc32 == token_checksum([1, 2, 3, 4, 5])
    assert torch.equal(states_format.decode(found)[:, 0], states[:, 0].bfloat16().float())
    start = 8 + int.from_bytes(data[:8], "little")
    for place in (start, len(data) - 1, (start + len(data)) // 2):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(ValueError, match="checksum"):
            read_sample_file(bytes(damaged), states_format, 16)
    for half in (data[: start + 7], data[:20], data[:-1], b""):
        with pytest.raises(ValueError, match=r"checksum|description"):
            read_sample_file(half, states_format, 16)


@pytest.fixture(scope="module")
def run(small_retraining: stages.Retraining, tmp_path_factory: pytest.TempPathFactory) -> stages.Retraining:
    """The small retraining up to its prepared data, in another store: its hidden states have not been extracted."""
    folder = tmp_path_factory.mktemp("online")
    shutil.copytree(Path(small_retraining.store.root) / "datasets", folder / "store" / "datasets")
    return with_changes(small_retraining, store=str(folder / "store"), work_dir=str(folder))


def with_changes(run: stages.Retraining, **changes: object) -> stages.Retraining:
    return stages.open_retraining(run.config.model_validate({**run.config.model_dump(), **changes}))


@pytest.fixture(scope="module")
def servers(run: stages.Retraining) -> Iterator[list[VllmServer]]:
    """Two vLLMs that serve hidden states."""
    capture = Capture(run.config, run.plan.extract, run.store, run.verifier)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [capture.server(f"online-{number}", online=True) for number in range(2)]
        yield list(pool.map(stack.enter_context, starting))


@pytest.fixture(scope="module")
def samples(run: stages.Retraining) -> dict[str, Sample]:
    return {s.sample_id: s for s in load_samples(run.store, run.plan.prepare, ["train", "validation"])}


def source(run: stages.Retraining, urls: list[str], samples: dict[str, Sample], owner: str = "test") -> OnlineStates:
    return OnlineStates(run.config, run.plan.extract, run.store, run.verifier, urls, samples, owner, 8)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to how vLLM rounds in batches of another shape."""
    assert found.shape == expected.shape
    assert torch.equal(found.any(dim=-1), expected.any(dim=-1))
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    assert float(errors.max()) < 1e-3


@pytest.mark.vllm
def test_a_server_that_dies_is_done_without(
    small_retraining: stages.Retraining,
    run: stages.Retraining,
    servers: list[VllmServer],
    samples: dict[str, Sample],
) -> None:
    """One of two servers is killed while both are at work: every state comes, right, and none is left in the store."""
    offline = HiddenStateReader.open(small_retraining.store, small_retraining.plan.extract)
    online = source(run, [server.url for server in servers], samples)
    names = list(samples)[:40]
    most, reading = 0, threading.Event()

    def read(name: str) -> torch.Tensor:
        nonlocal most
        found = online.read(name)
        most = max(most, len(run.store.list(online_directory(run.plan.extract))))
        reading.set()
        return found

    with ThreadPoolExecutor(8) as pool:
        found = pool.map(read, names)
        assert reading.wait(120)
        kill(servers[1])
        for name, states in zip(names, found, strict=True):
            check(states, offline.read(name))
    online.close()
    assert most <= 8 + 2
    assert run.store.list(online_directory(run.plan.extract)) == []


def kill(server: VllmServer) -> None:
    [process] = [p for p in psutil.process_iter(["cmdline"]) if str(port_of(server)) in (p.info["cmdline"] or [])][:1]
    for each in [*process.children(recursive=True), process]:
        os.kill(each.pid, signal.SIGKILL)


def port_of(server: VllmServer) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.vllm
def test_the_first_epoch_leaves_a_set_for_the_others(
    small_retraining: stages.Retraining,
    run: stages.Retraining,
    servers: list[VllmServer],
    samples: dict[str, Sample],
    tmp_path: Path,
) -> None:
    """A killed hybrid run goes on from the shards that it left; what is read in the end is what extraction makes."""
    offline = HiddenStateReader.open(small_retraining.store, small_retraining.plan.extract)
    few = dict(list(samples.items())[:12])
    where = (run.config, run.plan.extract, run.store, run.verifier)
    first = HybridStates(source(run, [servers[0].url], few), *where, few)
    for name in list(few)[:5]:
        check(first.read(name), offline.read(name))
    first.flush()
    for name in list(few)[5:7]:
        first.read(name)  # in memory only: lost when the run is killed
    assert {s.sample_id for s in finish_set(*where, list(few.values()))} == set(list(few)[5:])

    second = HybridStates(source(run, [servers[0].url], few), *where, few)
    for name in list(few)[:9]:
        check(second.read(name), offline.read(name))
    second.flush()
    second.finish()
    second.close()
    first.close()
    kept = HiddenStateReader.open(run.store, run.plan.extract)
    assert kept.sample_ids == list(few)
    for name in few:
        check(kept.read(name), offline.read(name))
    run.store.delete(run.plan.extract.directory)


@pytest.mark.vllm
def test_training_is_the_same_as_offline(
    small_retraining: stages.Retraining, run: stages.Retraining, servers: list[VllmServer]
) -> None:
    """torchrun with two ranks, from the first step to the drafter: the figures of the offline training."""
    offline = small_retraining.plan.train.require(small_retraining.store, "")
    extract = {**run.config.extract.model_dump(), "mode": "online", "endpoints": [servers[0].url]}
    changed = with_changes(run, extract=extract)
    records: list[dict] = []
    manifest = stages.run_train(changed, TerminalProgress(), records.append)
    log = small_retraining.store.read_bytes(small_retraining.plan.train.path("metrics.jsonl")).decode()
    expected = [json.loads(line) for line in log.splitlines()]
    assert [r["step"] for r in records] == [r["step"] for r in expected]
    for mine, other in zip(records, expected, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-2)
    assert manifest.figures["predicted_acceptance_length"] == pytest.approx(
        offline.figures["predicted_acceptance_length"], abs=0.02
    )
    assert run.store.list(online_directory(run.plan.extract)) == []
    assert run.plan.extract.finished(run.store) is None, "nothing is kept"


@pytest.mark.vllm
def test_without_any_server_the_error_says_so(run: stages.Retraining, samples: dict[str, Sample]) -> None:
    online = source(run, ["http://127.0.0.1:9"], samples)
    with pytest.raises(ServingError, match=r"http://127\.0\.0\.1:9"):
        online.read(next(iter(samples)))
    online.close()
