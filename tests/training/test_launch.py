"""Training under torchrun with two real gloo processes: learning, equality, kills, failures."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from speculators.checkpoints.speculators_format import load_drafter
from speculators.errors import MissingStageError, TrainingError
from speculators.manifest import Manifest, Stage, StagePlan
from speculators.progress import Progress
from speculators.store import Store
from speculators.training.launch import _explain
from tests.training.synthetic import SyntheticTraining, make_trainer, make_training, only_rank

ROOT = Path(__file__).resolve().parent.parent.parent


def training_processes(job_marker: str) -> list[psutil.Process]:
    """Processes whose command line names a training of this test."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(job_marker in argument for argument in process.cmdline()) and process.pid != os.getpid():
                found.append(process)
    return found


def wait_until_gone(job_marker: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while (left := training_processes(job_marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


class RecordingProgress(Progress):
    def __init__(self) -> None:
        self.total, self.seen = 0, []  # type: tuple[int, list[int]]

    def start(self, description: str, total: int, unit: str) -> None:
        self.total = total

    def update(self, done: int, total: int | None = None, **figures: Any) -> None:
        self.seen.append(done)


class Finished:
    """A training with two processes that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        store = Store(folder / "store", cache_dir=folder / "cache")
        self.training = make_training(folder, store, train_samples=60, epochs=5)
        self.records: list[dict[str, Any]] = []
        self.progress = RecordingProgress()
        self.manifest: Manifest = self.training.run(self.records, self.progress)

    def weights(self, name: str) -> bytes:
        return self.training.store.read_bytes(self.training.plan().path(f"{name}/model.safetensors"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("undisturbed"))


def test_the_loss_falls_and_the_acceptance_length_rises(finished: Finished) -> None:
    first, last = finished.records[0], finished.records[-1]
    assert last["loss"] < 0.3 * first["loss"]
    lengths = [r["predicted_acceptance_length"] for r in finished.records if "predicted_acceptance_length" in r]
    assert len(lengths) == 5
    assert lengths[-1] > lengths[0] + 0.2
    assert {"step", "epoch", "loss", "accuracy_step_0", "conditional_accuracy_step_2", "learning_rate"} <= set(first)
    assert {"tokens_per_s", "grad_norm", "validation_loss", "validation_accuracy_step_1"} <= set(last)
    steps = [r["step"] for r in finished.records]
    assert steps == sorted(set(steps))


def test_what_a_finished_training_leaves(finished: Finished) -> None:
    training, plan = finished.training, finished.training.plan()
    figures = finished.manifest.figures
    lengths = {r["epoch"]: r.get("predicted_acceptance_length") for r in finished.records}
    assert figures["predicted_acceptance_length"] == max(v for v in lengths.values() if v)
    assert figures["predicted_acceptance_length"] == lengths[figures["best_epoch"]]
    assert finished.progress.total == figures["steps"] == finished.progress.seen[-1]
    left = {path.removeprefix(f"{plan.directory}/") for path in training.store.list(plan.directory)}
    drafters = {f"{name}/{file}" for name in ("best", "last") for file in ("config.json", "model.safetensors")}
    assert left == {*drafters, "metrics.jsonl", "manifest.json"}
    assert set(finished.manifest.outputs) == left - {"manifest.json"}
    lines = training.store.read_bytes(plan.path("metrics.jsonl")).decode().splitlines()
    assert [json.loads(line) for line in lines] == finished.records
    for name in ("best", "last"):
        drafter, mapping, _ = load_drafter(Path(training.store.full_path(plan.path(name))))
        assert mapping is None
        assert drafter.config.num_layers == 1
    wait_until_gone(str(training.config.work_dir))


def test_a_finished_training_is_skipped(finished: Finished) -> None:
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    assert finished.training.run(records) == finished.manifest
    assert time.monotonic() - started < 2
    assert records == []


def test_one_process_learns_the_same_as_two(finished: Finished, tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=60, epochs=5, processes=1, tokens_per_batch=256)
    with only_rank():
        trainer = make_trainer(training)
        trainer.run()
    records = trainer.metrics.records
    assert [r["step"] for r in records] == [r["step"] for r in finished.records]
    # Rounding differs between the two and grows from step to step, so the first steps are the ones to compare.
    for one, two in list(zip(records, finished.records, strict=True))[:2]:
        for name in ("loss", "grad_norm", "accuracy_step_0"):
            assert one[name] == pytest.approx(two[name], rel=1e-3)


def test_killed_workers_resume_to_the_same_drafter(finished: Finished, tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=60, epochs=5)
    generator = random.Random(os.getpid())
    total = finished.manifest.figures["steps"]
    for victim in ("rank 0", "rank 1"):
        kill_at = generator.randint(1, total // 2)

        def kill(record: dict[str, Any], victim: str = victim, kill_at: int = kill_at) -> None:
            if record["step"] >= kill_at:
                workers = [p for p in training_processes(str(tmp_path)) if is_rank(p, victim[-1])]
                for worker in workers:
                    worker.kill()

        with pytest.raises(TrainingError, match=f"{victim} was ended by SIGKILL"):
            train_with(training, kill)
        wait_until_gone(str(tmp_path))
    records: list[dict[str, Any]] = []
    training.run(records)
    plan = training.plan()
    for name in ("best", "last"):
        assert store.read_bytes(plan.path(f"{name}/model.safetensors")) == finished.weights(name)
    assert [(r["step"], r["loss"]) for r in records] == [(r["step"], r["loss"]) for r in finished.records]


def train_with(training: SyntheticTraining, on_metrics: Any) -> None:
    class Records(list):  # type: ignore[type-arg]
        def append(self, record: dict[str, Any]) -> None:
            on_metrics(record)

    training.run(Records())


def is_rank(process: psutil.Process, rank: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RANK") == rank
    return False


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from speculators.store import Store\n"
        "from tests.training.synthetic import make_training\n"
        "folder = Path(sys.argv[1])\n"
        "store = Store(folder / 'store', cache_dir=folder / 'cache')\n"
        "training = make_training(folder, store, train_samples=60, epochs=1000)\n"
        "class Records(list):\n"
        "    def append(self, record): print(record['step'], flush=True)\n"
        "training.run(Records())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().strip() == "5"
        assert len(training_processes(str(tmp_path / "work"))) >= 3
        launcher.send_signal(signal.SIGKILL)
    wait_until_gone(str(tmp_path / "work"))


def test_the_failing_rank_and_its_error_are_shown(tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=12)
    shard = next(p for p in store.list(training.extract_plan.directory) if p.endswith(".safetensors"))
    file = Path(store.full_path(shard))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x55
    file.write_bytes(data)
    with pytest.raises(TrainingError, match=r"Training failed on rank \d: .*damaged") as caught:
        training.run()
    assert "run again" in str(caught.value)
    log = Path(str(caught.value).partition("whole log: ")[2].split(".log")[0] + ".log")
    assert "Traceback" in log.read_text()
    wait_until_gone(str(tmp_path))


def test_earlier_stages_must_have_finished(tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=2, validation_samples=1)
    training.extract_plan = StagePlan(Stage.EXTRACT, {"other": 1})
    with pytest.raises(MissingStageError, match="'extract' has not finished"):
        training.run()


def test_an_error_that_follows_from_another_is_not_the_one_shown() -> None:
    lost = {"rank": 0, "type": "RuntimeError", "message": "Connection closed by peer", "for_user": False}
    cause = {"rank": 1, "type": "ValueError", "message": "the cause", "for_user": False}
    events = [{**lost, "lost_peer": True}, {**cause, "lost_peer": False}]
    assert "rank 1: ValueError: the cause" in _explain(events, [], 1, Path("x.log"))
    tail = [
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -15 (pid: 6)",
        "Root Cause (first observed failure):",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -9 (pid: 7)",
    ]
    assert "rank 1 was ended by SIGKILL" in _explain(events[:1], tail, 1, Path("x.log"))
    assert "Its last lines:\n  boom" in _explain([], ["boom"], 3, Path("x.log"))
