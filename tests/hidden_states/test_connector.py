"""The connector in real vLLM where it is hardest: pieces of prompts, shared prefixes, long prompts, a failing store."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from speculators.config import RetrainConfig
from speculators.data.prepare import Sample
from speculators.errors import StoreError
from speculators.hidden_states import extract as module
from speculators.hidden_states.format import SHARDS, Sidecar
from speculators.hidden_states.reader import HiddenStateReader
from speculators.manifest import Stage, StagePlan
from speculators.progress import TerminalProgress
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store
from speculators.verifier import Verifier

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 200
PREPARE = StagePlan(Stage.PREPARE, {})


def make_config(folder: Path) -> RetrainConfig:
    """vLLM computes at most 64 tokens a step, so most prompts come in pieces and are mixed with others' pieces."""
    return RetrainConfig.model_validate(
        {
            "store": str(folder / "store"),
            "work_dir": str(folder),
            "serving": {
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 8,
                "cpu_kv_cache_gib": 1,
                "extra_args": ["--max-num-batched-tokens", "64"],
            },
            "prepare": {"max_length": MAX_MODEL_LEN - 1},
            "extract": {"dtype": "float32", "shard_mib": 2, "concurrency": 6},
        }
    )


def make_samples(vocab_size: int) -> list[Sample]:
    chance = random.Random(0)
    prefix = [chance.randrange(vocab_size) for _ in range(100)]
    lengths = [1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 150, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1]
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
    layers = [verifier.num_layers - 3, 0, 2, verifier.num_layers, verifier.num_layers]
    plan = StagePlan(Stage.EXTRACT, {"layer_ids": layers, "dtype": "float32"})
    store = Store(config.store)
    module.extract(config, plan, PREPARE, store, verifier, layers, TerminalProgress())
    reader = HiddenStateReader(store, plan)
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()
    for sample in samples:
        found = reader.read(sample.sample_id)
        assert found.shape == (len(sample.token_ids), len(layers), verifier.hidden_size)
        with torch.no_grad():
            tokens = torch.from_numpy(sample.token_ids).long()[None]
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
    layers = [2, verifier.num_layers]
    plan = StagePlan(Stage.EXTRACT, {"layer_ids": layers, "dtype": "float32"})
    store = Store(config.store)
    repository = str(Path(module.__file__).resolve().parents[2])
    arguments = module._server_arguments(config, plan, store, verifier, layers)
    wanted = samples[5]

    def ask(server: VllmServer, timeout_s: float = 60, max_tokens: int = 1, **more: object) -> httpx.Response:
        body = {"model": "verifier", "prompt": wanted.token_ids.tolist(), "max_tokens": max_tokens, "temperature": 0}
        return httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=timeout_s)

    with VllmServer(
        config.serving, verifier.path, tmp_path, name="connector", extra_args=arguments, env={"PYTHONPATH": repository}
    ) as server:
        assert ask(server).status_code == 200
        with pytest.raises(httpx.TimeoutException):
            ask(server, 1.0, 150, ignore_eos=True, kv_transfer_params={"sample_id": "aborted"})
        for _ in range(2):
            answer = ask(server, kv_transfer_params={"sample_id": wanted.sample_id}, request_id="the-same")
            assert answer.status_code == 200
        time.sleep(5)
        paths = [path for path in store.list(plan.path(SHARDS)) if path.endswith(".json")]
        entries = [entry for path in paths for entry in Sidecar.from_json(store.read_json(path)).samples]
        assert [entry.sample_id for entry in entries] == [wanted.sample_id] * 2
        assert len({(entry.tokens, entry.token_crc32) for entry in entries}) == 1

    monkeypatch.setattr(module, "load_samples", lambda *args: samples)
    store.delete(plan.path(SHARDS))
    store.write_bytes(plan.path(SHARDS), json.dumps("a file where the folder should be").encode())
    with pytest.raises(StoreError, match=SHARDS):
        module.extract(config, plan, PREPARE, store, verifier, layers, TerminalProgress())
    assert plan.finished(store) is None
