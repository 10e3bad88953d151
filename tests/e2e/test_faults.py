"""Runs that are killed, cancelled or cannot work: nothing is left behind, nothing is lost, the next run finishes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from speculators.config import RetrainConfig
from speculators.manifest import Stage
from tests.e2e.conftest import TINY, FlowProcess

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]


def manifests(store: Path) -> dict[str, dict]:
    """Manifest of each finished stage."""
    found = [json.loads(path.read_text()) for path in store.glob("*/*/manifest.json")]
    return {manifest["stage"]: manifest for manifest in found}


def files(store: Path, pattern: str) -> list[Path]:
    """Files that match, temporary ones left out."""
    return [path for path in store.glob(pattern) if not path.name.startswith(".")]


def _grown(store: Path, pattern: str, before: int) -> bool:
    return len(files(store, pattern)) > before


def _evaluating(flow: FlowProcess) -> bool:
    return "vLLM is starting" in flow.output().rpartition("export")[2]


def test_killed_in_every_stage(start_flow: Callable[..., FlowProcess], tmp_path: Path, verifier: object) -> None:
    """SIGTERM, then SIGKILL in each long stage; each time all processes end, and the run goes on from where it was."""
    store = tmp_path / "store"
    config = {**TINY, "store": str(store), "tracking": {"mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    # A signal, the files of which a new one must appear before it is sent, and the stage that it hits.
    interruptions = [
        (signal.SIGTERM, "datasets/*/parts/*", Stage.REGENERATE),
        (signal.SIGKILL, "datasets/*/parts/*", Stage.REGENERATE),
        (signal.SIGKILL, "hidden_states/*/shards/*.json", Stage.EXTRACT),
        (signal.SIGKILL, "checkpoints/*/state/latest.json", Stage.TRAIN),
        (signal.SIGKILL, "drafters/*/manifest.json", Stage.EVALUATE),
    ]
    finished_before: dict[str, dict] = {}
    for how, pattern, stage in interruptions:
        before = len(files(store, pattern))
        # Killed with states saved along with the answers, then without, so that extraction has something left to do.
        flow = start_flow({**config, "extract": {"shard_mib": 1, "one_pass": how is signal.SIGTERM}})
        flow.wait_until(partial(_grown, store, pattern, before))
        if stage is Stage.EVALUATE:
            flow.wait_until(partial(_evaluating, flow))
        left = flow.interrupt(how)
        assert not left, f"{how.name} in {stage.value} left {left}"
        now = manifests(store)
        assert stage.value not in now, f"{stage.value} was over before it could be interrupted"
        assert {name: now[name] for name in finished_before} == finished_before, "a finished stage was done again"
        finished_before = now

    flow = start_flow(config)
    assert flow.wait() == 0, flow.output()[-6000:]
    assert set(manifests(store)) == {stage.value for stage in Stage}
    [conversations] = files(store, "datasets/*/conversations.parquet")
    samples = pd.read_parquet(conversations)["sample_id"]
    assert samples.is_unique
    assert samples.str.partition("/")[0].nunique() == TINY["regenerate"]["max_prompts"]  # type: ignore[index]
    steps = [
        json.loads(line)["step"] for line in files(store, "checkpoints/*/metrics.jsonl")[0].read_text().splitlines()
    ]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serving": {**TINY["serving"], "extra_args": ["--no-such-flag"]}}, "no-such-flag"),
        ({"serving": {**TINY["serving"], "python": "/nowhere/python"}}, "/nowhere/python"),
        ({"verifier": {"model": "./no-such-folder"}}, "no-such-folder"),
        ({"extract": {"aux_layer_ids": [2, 99]}}, "layer 99 does not exist"),
        ({"store": "/proc/no-store"}, "/proc/no-store"),
        ({"tracking": {"mlflow_uri": "http://127.0.0.1:9"}}, "MLflow at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_work_ends_with_one_clear_error(
    start_flow: Callable[..., FlowProcess], tmp_path: Path, verifier: object, change: dict, message: str
) -> None:
    config = {
        **TINY,
        "store": str(tmp_path / "store"),
        "tracking": {"mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"},
        **change,
    }
    flow = start_flow(config)
    assert flow.wait(300) == 1
    last = flow.output().rpartition("\nerror: ")[2]
    assert message in last
    assert "Traceback" not in flow.output()


def test_a_broken_prompts_file_names_the_line(start_flow: Callable[..., FlowProcess], tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"turns": ["What is a tide?"]}\n{"turns": ["broken"\n')
    config = {**TINY, "store": str(tmp_path / "store"), "regenerate": {"prompts": str(prompts)}}
    flow = start_flow(config)
    assert flow.wait(300) == 1
    error = flow.output().rpartition("\nerror: ")[2]
    assert "mine.jsonl" in error
    assert "2" in error


def test_default_configuration_fits_the_default_verifier() -> None:
    assert RetrainConfig().verifier.model == "smollm2-135m-instruct"
