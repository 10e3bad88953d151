"""What extract() does around vLLM: resuming, waiting for the store, and saying why it failed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from speculators.config import RetrainConfig
from speculators.data.prepare import Sample
from speculators.errors import PipelineError, ServingError, StoreError
from speculators.hidden_states import capture
from speculators.hidden_states import extract as module
from speculators.hidden_states.format import ERRORS, SHARDS, StateFormat, token_checksum
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import Manifest, Stage, StagePlan
from speculators.progress import Progress
from speculators.store import TEMPORARY_MARK, Store

HIDDEN, LAYERS = 4, [1, 2, 4]
VERIFIER = SimpleNamespace(path=Path("model"), hidden_size=HIDDEN, num_layers=4, architectures=["LlamaForCausalLM"])
FORMAT = StateFormat(tuple(LAYERS), "float32", "float32")
PLAN = StagePlan(Stage.EXTRACT, {"states": FORMAT.to_json()})
PREPARE = StagePlan(Stage.PREPARE, {})


def make_sample(number: int) -> Sample:
    tokens = np.arange(number, number + 5 + number, dtype=np.int32)
    return Sample(f"p{number}/0", f"p{number}", "train", tokens, np.arange(len(tokens)) >= 2, 2)


def states_of(sample: Sample) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(sample.token_ids[0]))
    states = torch.randn(len(sample.token_ids) - 1, len(LAYERS), HIDDEN, generator=generator)
    states[:1, -1] = 0  # not stored: it would predict a token of the prompt
    return states


def save(writer: ShardWriter, sample: Sample, rows: int | None = None, last_from: int = 1, tokens: Any = None) -> None:
    """What the connector does with a sample; wrong where asked for."""
    states = FORMAT.encode(states_of(sample)[:rows], last_from)
    writer.add(sample.sample_id, states, token_checksum(sample.token_ids[:-1] if tokens is None else tokens))


class FakeServer:
    """Stands for VllmServer: its ShardWriter is what the connector would have inside vLLM."""

    url, log_file = "http://fake", Path("fake.log")

    def __init__(self, store: Store) -> None:
        self.store, self.starts = store, 0
        self.asked: list[str] = []
        self.dead: str | None = None
        self.on_sample: Callable[[str, ShardWriter], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> FakeServer:
        return self

    def __enter__(self) -> FakeServer:
        self.starts += 1
        self.asked = []
        self.writer = ShardWriter(self.store, PLAN.directory, FORMAT, 600, idle_flush_s=0.1)
        return self

    def __exit__(self, *details: object) -> None:
        try:
            self.writer.close()
        except StoreError:
            assert self.dead is not None

    def check_alive(self) -> None:
        if self.dead is not None:
            raise ServingError(self.dead)


@pytest.fixture
def samples() -> list[Sample]:
    return [make_sample(number) for number in range(12)]


@pytest.fixture
def server(store: Store, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer(store)
    by_tokens = {tuple(sample.token_ids[:-1].tolist()): sample for sample in samples}

    class FakeClient:
        def __init__(self, *args: object) -> None: ...

        async def __aenter__(self) -> FakeClient:
            return self

        async def __aexit__(self, *details: object) -> None: ...

        async def complete(self, prompt: list[int], *, max_tokens: int, kv_transfer_params: dict, **rest: Any) -> None:
            await asyncio.sleep(0.01)
            sample = by_tokens[tuple(prompt)]
            assert (max_tokens, kv_transfer_params) == (
                1,
                {"sample_id": sample.sample_id, "last_from": 1, "max_rows": 511},
            )
            if fake.dead is not None:
                raise ServingError("the connection failed")
            fake.asked.append(sample.sample_id)
            if fake.on_sample is not None:
                fake.on_sample(sample.sample_id, fake.writer)
            else:
                save(fake.writer, sample)

    monkeypatch.setattr(capture, "VllmServer", fake)
    monkeypatch.setattr(module, "VllmClient", FakeClient)
    monkeypatch.setattr(module, "load_samples", lambda *args: samples)
    return fake


def run(store: Store, plan: StagePlan = PLAN) -> Manifest:
    config = RetrainConfig.model_validate({"extract": {"concurrency": 3, "dtype": "float32"}})
    return module.extract(config, plan, PREPARE, store, VERIFIER, Progress())  # type: ignore[arg-type]


def check_whole(store: Store, samples: list[Sample]) -> None:
    reader = HiddenStateReader.open(store, PLAN)
    assert reader.sample_ids == [sample.sample_id for sample in samples]
    for sample in samples:
        assert torch.equal(reader.read(sample.sample_id), states_of(sample))
        reader.check_tokens(sample.sample_id, sample.token_ids.tolist())


def test_every_sample_is_asked_for_once(store: Store, server: FakeServer, samples: list[Sample]) -> None:
    manifest = run(store)
    check_whole(store, samples)
    assert sorted(server.asked) == sorted(sample.sample_id for sample in samples)
    assert manifest.figures["samples"] == len(samples)
    assert manifest.figures["tokens"] == sum(len(sample.token_ids) - 1 for sample in samples)
    assert manifest.figures["bytes_per_token"] > 4 * (len(LAYERS) - 1) * HIDDEN
    assert run(store) == manifest
    assert server.starts == 1


def test_layers_are_asked_for_in_the_order_that_vllm_has(store: Store) -> None:
    """vLLM sorts them; the connector is told the order that is wanted."""
    states = {**FORMAT.to_json(), "layer_ids": [4, 1, 2, 4]}
    plan = StagePlan(Stage.EXTRACT, {"states": states})
    arguments = capture.Capture(RetrainConfig(), plan, store, VERIFIER).server_arguments()  # type: ignore[arg-type]
    speculative, transfer = (
        json.loads(arguments[arguments.index(name) + 1]) for name in ("--speculative-config", "--kv-transfer-config")
    )
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert transfer["kv_connector_extra_config"]["states"] == states


def test_a_head_without_auxiliary_layers_needs_the_last_one_everywhere(store: Store) -> None:
    states = {**FORMAT.to_json(), "layer_ids": [4]}
    plan = StagePlan(Stage.EXTRACT, {"states": states})
    asked = capture.Capture(RetrainConfig(), plan, store, VERIFIER).request("p/0")  # type: ignore[arg-type]
    assert asked == {"sample_id": "p/0", "last_from": 0, "max_rows": RetrainConfig().prepare.max_length - 1}
    assert module.last_from(StateFormat.from_json(states), make_sample(3)) == 0
    assert module.last_from(FORMAT, make_sample(3)) == 1


def test_an_interrupted_run_goes_on(store: Store, server: FakeServer, samples: list[Sample]) -> None:
    def break_off(sample_id: str, writer: ShardWriter) -> None:
        if len(server.asked) > 6:
            time.sleep(0.3)  # until the writer has flushed what it got
            server.dead = "vLLM (vllm-extract) died: killed"
            return
        save(writer, next(s for s in samples if s.sample_id == sample_id))

    server.on_sample = break_off
    with pytest.raises(ServingError, match="died: killed"):
        run(store)
    assert PLAN.finished(store) is None

    shards = Path(store.full_path(PLAN.path(SHARDS)))
    (shards / "killed-00000.safetensors").write_bytes(b"half")
    abandoned, recent = (shards / f".killed-0000{n}.safetensors{TEMPORARY_MARK}1" for n in (1, 2))
    abandoned.write_bytes(b"half")
    recent.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    server.dead = server.on_sample = None
    run(store)
    assert len(server.asked) == len(samples) - 6
    check_whole(store, samples)
    assert not (shards / "killed-00000.safetensors").exists()
    assert not abandoned.exists()
    assert recent.exists()


def test_what_is_not_the_samples_own_does_not_count(store: Store, server: FakeServer, samples: list[Sample]) -> None:
    """Other tokens, other length, too little of the last layer, a shard that is gone: asked for again.

    Of a sample saved twice one counts."""
    first, second, third, fourth, fifth = samples[:5]
    with ShardWriter(store, PLAN.directory, FORMAT, 1, idle_flush_s=0.1) as writer:
        save(writer, first, tokens=[1, 2, 3])
        save(writer, second, rows=-1)
        save(writer, third, last_from=2)
        save(writer, fourth)
    [gone] = [path for path in store.list(PLAN.path(SHARDS)) if path.endswith("-00003.safetensors")]
    store.delete(gone)
    with ShardWriter(store, PLAN.directory, FORMAT, 1, idle_flush_s=0.1) as writer:
        for _ in range(2):
            save(writer, fifth)
    run(store)
    assert {sample.sample_id for sample in (first, second, third, fourth)} <= set(server.asked)
    assert fifth.sample_id not in server.asked
    check_whole(store, samples)


def test_a_writers_error_is_the_stages_error(store: Store, server: FakeServer, samples: list[Sample]) -> None:
    """The writer notes why it gave up, the server dies; the run says why, and the next one starts afresh."""

    def fail(sample_id: str, writer: ShardWriter) -> None:
        store.write_json(PLAN.path(f"{ERRORS}/writer-1.json"), {"message": "Cannot write shards/x: no space left."})
        server.dead = "vLLM (vllm-extract) died: exit status 1"

    server.on_sample = fail
    with pytest.raises(StoreError, match=r"Cannot write shards/x: no space left\."):
        run(store)
    server.dead = server.on_sample = None
    run(store)
    check_whole(store, samples)


def test_a_store_that_takes_no_note_is_found_in_the_log(store: Store, server: FakeServer) -> None:
    def fail(sample_id: str, writer: ShardWriter) -> None:
        server.dead = "vLLM (vllm-extract) died: StoreError: Cannot write shards/x: no space left."

    server.on_sample = fail
    with pytest.raises(StoreError, match=r"^Cannot write shards/x: no space left"):
        run(store)


def test_a_store_that_goes_away_is_one_clear_error(
    store: Store, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(prefix: str) -> list[str]:
        raise StoreError("Cannot list s3://bucket: the endpoint does not answer.")

    def lose(sample_id: str, writer: ShardWriter) -> None:
        monkeypatch.setattr(store, "list", gone)

    server.on_sample = lose
    with pytest.raises(PipelineError, match="the endpoint does not answer"):
        run(store)


def test_states_that_never_arrive_are_an_error(
    store: Store, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STALLED_S", 1.0)
    server.on_sample = lambda sample_id, writer: None
    with pytest.raises(ServingError, match=r"12 samples did not reach the store within 1 s\. See fake\.log"):
        run(store)


def test_too_little_space_is_said_before_vllm_starts(
    store: Store, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "free_bytes", lambda: 1000)
    with pytest.raises(StoreError, match=r"need about 0\.00 GiB, but only 0\.00 GiB are free"):
        run(store)
    assert server.starts == 0
