"""The connector in real vLLM where it is hardest: pieces of prompts, shared prefixes, long prompts, a failing store."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import s3fs
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from speculators import stages
from speculators.config import RetrainConfig
from speculators.data.prepare import Sample, load_samples
from speculators.errors import StoreError
from speculators.hidden_states import extract as module
from speculators.hidden_states.capture import Capture
from speculators.hidden_states.format import SHARDS, Sidecar, StateFormat
from speculators.hidden_states.reader import HiddenStateReader
from speculators.manifest import Stage, StagePlan
from speculators.models.batch import PackedBatch
from speculators.progress import TerminalProgress
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store
from speculators.training.batches import BatchLoader, plan_epoch
from speculators.verifier import Verifier, read_verifier
from tests.faulty_s3 import FaultyS3

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 200
PREPARE = StagePlan(Stage.PREPARE, {})


def make_plan(layers: tuple[int, ...]) -> StagePlan:
    return StagePlan(Stage.EXTRACT, {"states": StateFormat(layers, "float32", "float32").to_json()})


def make_config(folder: Path) -> RetrainConfig:
    """vLLM computes at most 64 tokens a step, so most prompts come in pieces and are mixed with others' pieces; blocks
    are small, so that prefixes are found in its cache."""
    return RetrainConfig.model_validate(
        {
            "store": str(folder / "store"),
            "work_dir": str(folder),
            "serving": {
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 8,
                "cpu_kv_cache_gib": 1,
                "extra_args": ["--max-num-batched-tokens", "64", "--block-size", "32"],
            },
            "prepare": {"max_length": MAX_MODEL_LEN - 1},
            "extract": {"dtype": "float32", "shard_mib": 2, "concurrency": 6},
        }
    )


def make_samples(vocab_size: int) -> list[Sample]:
    chance = random.Random(0)
    prefix = [chance.randrange(vocab_size) for _ in range(100)]
    lengths = [2, 3, 15, 16, 17, 31, 33, 64, 65, 127, 150, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1]
    prompts = [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]
    prompts += [prefix + [chance.randrange(vocab_size) for _ in range(more)] for more in (1, 30, 60, 99)]
    return [
        Sample(f"p{n}/0", f"p{n}", "train", np.array(p, dtype=np.int32), np.ones(len(p), dtype=np.bool_), 1)
        for n, p in enumerate(prompts)
    ]


def test_states_are_right_whatever_the_order_and_the_batches(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in an order of our own, one of them twice: every row of every sample is what transformers computes."""
    config, samples = make_config(tmp_path), make_samples(verifier.vocab_size)
    monkeypatch.setattr(module, "load_samples", lambda *args: samples)
    layers = (verifier.num_layers - 3, 0, 2, verifier.num_layers, verifier.num_layers)
    plan = make_plan(layers)
    store = Store(config.store)
    module.extract(config, plan, PREPARE, store, verifier, TerminalProgress())
    reader = HiddenStateReader.open(store, plan)
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()
    for sample in samples:
        found = reader.read(sample.sample_id)
        assert found.shape == (len(sample.token_ids) - 1, len(layers), verifier.hidden_size)
        with torch.no_grad():
            tokens = torch.from_numpy(sample.token_ids[:-1]).long()[None]
            expected = model(tokens, output_hidden_states=True).hidden_states
            for index, layer in enumerate(layers):
                # transformers' last entry is after the final norm, vLLM's before it.
                mine = model.model.norm(found[:, index]) if layer == verifier.num_layers else found[:, index]
                # A row of another token is off by about 1. Random tokens make a few rows ill-conditioned: where vLLM
                # is 2e-4 away, transformers' own float32 is ten times further from its float64 than elsewhere.
                errors = (mine - expected[layer][0]).norm(dim=-1) / expected[layer][0].norm(dim=-1)
                assert errors.max() < 1e-3, f"layer {layer} of {sample.sample_id}, position {errors.argmax()}"
                assert errors.median() < 1e-5, f"layer {layer} of {sample.sample_id}: median {errors.median():.2e}"
                relative = (mine - expected[layer][0]).norm() / expected[layer][0].norm()
                assert relative < 1e-4, f"layer {layer} of {sample.sample_id}: {relative:.2e}"


def test_only_complete_requests_with_a_sample_are_saved_and_a_failing_store_ends_the_run(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, samples = make_config(tmp_path), make_samples(verifier.vocab_size)
    plan = make_plan((2, verifier.num_layers))
    store = Store(config.store)
    wanted = samples[9]

    def ask(server: VllmServer, timeout_s: float = 60, max_tokens: int = 1, **more: object) -> httpx.Response:
        body = {"model": "verifier", "prompt": wanted.token_ids.tolist(), "max_tokens": max_tokens, "temperature": 0}
        return httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=timeout_s)

    with Capture(config, plan, store, verifier).server("connector") as server:
        assert ask(server).status_code == 200
        with pytest.raises(httpx.TimeoutException):
            ask(server, 1.0, 150, ignore_eos=True, kv_transfer_params={"sample_id": "aborted"})
        for _ in range(2):
            answer = ask(server, kv_transfer_params={"sample_id": wanted.sample_id}, request_id="the-same")
            assert answer.status_code == 200
        assert prefix_cache_hits(server) > 0
        time.sleep(5)
        paths = [path for path in store.list(plan.path(SHARDS)) if path.endswith(".json")]
        entries = [entry for path in paths for entry in Sidecar.from_json(store.read_json(path)).samples]
        assert [entry.sample_id for entry in entries] == [wanted.sample_id] * 2
        assert len({(entry.rows, entry.token_crc32) for entry in entries}) == 1

    monkeypatch.setattr(module, "load_samples", lambda *args: samples)
    store.delete(plan.path(SHARDS))
    store.write_bytes(plan.path(SHARDS), json.dumps("a file where the folder should be").encode())
    with pytest.raises(StoreError, match=SHARDS):
        module.extract(config, plan, PREPARE, store, verifier, TerminalProgress())
    assert plan.finished(store) is None


def test_ranks_share_the_verifier_and_save_each_sample_once(verifier: Verifier, tmp_path: Path) -> None:
    """A tiny random model over two tensor-parallel ranks: what the first one saves is whole."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=verifier.vocab_size, max_position_embeddings=512)).eval()
    model.save_pretrained(tmp_path / "model")
    for file in verifier.path.glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    tiny = read_verifier(tmp_path / "model", str(tmp_path / "model"), None, tmp_path / "cache")
    base = make_config(tmp_path)
    serving = {**base.serving.model_dump(), "tensor_parallel_size": 2}
    config = base.model_validate({**base.model_dump(), "serving": serving})
    samples, plan, store = make_samples(verifier.vocab_size)[:12], make_plan((1, 2, 4)), Store(config.store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_samples", lambda *args: samples)
        module.extract(config, plan, PREPARE, store, tiny, TerminalProgress())
    reader = HiddenStateReader.open(store, plan)
    for sample in samples:
        found = reader.read(sample.sample_id)
        with torch.no_grad():
            tokens = torch.from_numpy(sample.token_ids[:-1].copy()).long()[None]
            expected = model(tokens, output_hidden_states=True).hidden_states
            mine = [found[:, 0], found[:, 1], model.model.norm(found[:, 2])]
        for states, layer in zip(mine, (1, 2, 4), strict=True):
            assert (states - expected[layer][0]).norm() < 1e-5 * expected[layer][0].norm()
    saved = [
        entry.sample_id
        for path in store.list(plan.path(SHARDS))
        if path.endswith(".json")
        for entry in Sidecar.from_json(store.read_json(path)).samples
    ]
    assert sorted(saved) == sorted(sample.sample_id for sample in samples)


def prefix_cache_hits(server: VllmServer) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_a_slow_store_holds_vllm_back(
    verifier: Verifier, tmp_path: Path, s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes less than vLLM makes, and vLLM's cache holds a few samples: all arrive, in the store's own time.

    Meanwhile requests wait in vLLM, which neither dies nor throws out any that runs."""
    samples = make_samples(verifier.vocab_size)
    base = make_config(tmp_path)
    config = base.model_validate(
        {
            **base.model_dump(),
            "store": f"s3://{s3_bucket}/slow",
            "serving": {
                **base.serving.model_dump(),
                "extra_args": [*base.serving.extra_args, "--num-gpu-blocks-override", "40"],
            },
            "extract": {**base.extract.model_dump(), "shard_mib": 1, "concurrency": 17},
        }
    )
    plan = make_plan((2, 12, verifier.num_layers))
    monkeypatch.setattr(module, "load_samples", lambda *args: samples)
    with FaultyS3(s3_endpoint) as proxy:
        proxy.bytes_per_s = 400_000
        proxy.inject("throttle", methods={"PUT"}, match=f"/{SHARDS}/")
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        store = Store(config.store, cache_dir=tmp_path / "cache")
        manifest = module.extract(config, plan, PREPARE, store, verifier, TerminalProgress())
        proxy.clear()
        # Two shards are on their way at a time, each at 400 kB/s.
        assert manifest.figures["bytes"] / manifest.seconds < 900_000
        reader = HiddenStateReader.open(store, plan)
        for sample in samples:
            reader.check_tokens(sample.sample_id, sample.token_ids.tolist())
            assert reader.read(sample.sample_id).isfinite().all()
    [log] = (tmp_path / "logs").glob("vllm-extract-*.log")
    text = log.read_text(errors="replace")
    assert re.search(r"more slowly than vLLM makes them; [1-9]\d* finished requests wait", text)
    assert "preempt" not in text.lower()


def test_one_pass_leaves_the_batches_that_two_passes_leave(verifier: Verifier, tmp_path: Path) -> None:
    """Answers and their states come from one pass over the verifier; only rounding differs from a second pass.

    Multi-turn prompts share prefixes in vLLM's cache, answers are cut by max_tokens or end by themselves, and samples
    are cut at max_length."""
    config = RetrainConfig.model_validate(
        {
            "store": str(tmp_path / "store"),
            "work_dir": str(tmp_path),
            "verifier": {"model": str(verifier.path)},
            "serving": {"max_model_len": 320, "max_num_seqs": 8, "cpu_kv_cache_gib": 1},
            "regenerate": {"max_prompts": 20, "max_tokens": 40, "concurrency": 8},
            "prepare": {"held_out_prompts": 3, "validation_prompts": 3, "max_length": 120, "draft_vocab_size": 2048},
            "extract": {"dtype": "float32", "shard_mib": 2, "concurrency": 6},
        }
    )
    run = stages.open_retraining(config)
    stages.run_regenerate(run, TerminalProgress())
    prepared = stages.run_prepare(run)
    one_pass = stages.run_extract(run, TerminalProgress())
    assert one_pass.figures["computed_tokens"] == 0, "a second pass over the verifier was needed"
    samples = {s.sample_id: s for s in load_samples(run.store, run.plan.prepare, ["train", "validation"])}
    assert any(len(s.token_ids) == 120 for s in samples.values())
    assert any(not s.sample_id.endswith("/0") for s in samples.values())
    saved = {
        entry.sample_id
        for path in run.store.list(run.plan.extract.path(SHARDS))
        if path.endswith(".json")
        for entry in Sidecar.from_json(run.store.read_json(path)).samples
    }
    held_out = load_samples(run.store, run.plan.prepare, ["held_out"])
    assert len(held_out) == prepared.figures["held_out_samples"] > 0
    assert not saved & {s.sample_id for s in held_out}
    batches = load_batches(run, samples)

    run.store.delete(run.plan.extract.directory)
    two_passes = stages.run_extract(run, TerminalProgress())
    assert two_passes.figures["computed_tokens"] == one_pass.figures["tokens"] == two_passes.figures["tokens"]
    for mine, other in zip(batches, load_batches(run, samples), strict=True):
        for field in ("token_ids", "loss_mask", "document_ids", "positions"):
            assert torch.equal(getattr(mine, field), getattr(other, field))
        # A layer at a time: their sizes differ by orders of magnitude.
        difference = (mine.hidden_states - other.hidden_states).norm(dim=-1)
        size = other.hidden_states.norm(dim=-1)
        assert torch.equal(mine.hidden_states.any(dim=-1), other.hidden_states.any(dim=-1))
        assert float((difference / size.clamp(min=1e-6)).max()) < 1e-3
        assert float((difference[size > 0] / size[size > 0]).median()) < 1e-5


def load_batches(run: stages.Retraining, samples: dict[str, Sample]) -> list[PackedBatch]:
    lengths = {name: len(sample.token_ids) for name, sample in samples.items()}
    shares = [step[0] for step in plan_epoch(lengths, 256, 1, (0, 0))]
    reader = HiddenStateReader.open(run.store, run.plan.extract)
    with BatchLoader(shares, samples, reader, torch.float32) as loader:
        return list(loader)
