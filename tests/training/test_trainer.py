"""The training loop as the only rank of a process group in this process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.config import TrainConfig
from speculators.errors import TrainingError
from speculators.store import Store
from speculators.training.job import TrainingJob, parse_event
from speculators.training.metrics import StepSums
from speculators.training.trainer import learning_rate, make_optimizer
from tests.training.synthetic import AUX_LAYERS, LAYERS, SyntheticTraining, make_trainer, make_training, only_rank


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with only_rank():
        yield


def final_weights(training: SyntheticTraining, name: str = "last") -> bytes:
    return training.store.read_bytes(training.plan().path(f"{name}/model.safetensors"))


def test_a_job_survives_its_file(tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=2, validation_samples=1)
    plans = training.plan(), training.prepare_plan, training.extract_plan
    job = TrainingJob(training.config, *plans, store, training.verifier, AUX_LAYERS, [])
    job.write(tmp_path / "job.json")
    read = TrainingJob.read(tmp_path / "job.json")
    assert (read.config, read.verifier, read.aux_layer_ids) == (job.config, job.verifier, job.aux_layer_ids)
    assert (read.store.url, read.store.cache_dir) == (store.url, store.cache_dir)
    assert [p.directory for p in (read.plan, read.prepare_plan, read.extract_plan)] == [p.directory for p in plans]


def test_a_run_stopped_anywhere_goes_on_bit_for_bit(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path, store, train_samples=20, validation_samples=4, processes=1)
    undisturbed = make_trainer(training)
    undisturbed.run()
    expected = [final_weights(training, name) for name in ("last", "best")]
    expected_records = [untimed(r) for r in undisturbed.metrics.records]
    total = undisturbed.total_steps
    assert total > 10

    for stop_after in (1, 4, total // 2, total // 2 + 1, total - 1):
        store.delete(training.plan().directory)
        stopped = make_trainer(training)
        train_step, steps = stopped._train_step, iter(range(stop_after))

        def step_until_stopped(*args: Any, train_step: Any = train_step, steps: Any = steps) -> float:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return train_step(*args)

        monkeypatch.setattr(stopped, "_train_step", step_until_stopped)
        with pytest.raises(KeyboardInterrupt):
            stopped.run()
        torch.manual_seed(12345)
        resumed = make_trainer(training)
        resumed.run()
        assert [final_weights(training, name) for name in ("last", "best")] == expected
        assert [untimed(r) for r in resumed.metrics.records] == expected_records
        lines = store.read_bytes(training.plan().path("metrics.jsonl")).decode().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [r["step"] for r in expected_records]


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in ("tokens_per_s", "states_mb_per_s", "waiting_for_states")}


def test_a_finished_run_only_reports_again(tmp_path: Path, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    training = make_training(tmp_path, store, train_samples=6, validation_samples=2, processes=1)
    make_trainer(training).run()
    capfd.readouterr()
    make_trainer(training).run()
    events = [e for line in capfd.readouterr().out.splitlines() if (e := parse_event(line))]
    assert events[0]["kind"] == "started"
    assert events[0]["step"] == events[0]["steps"]
    assert events[-1]["kind"] == "finished"
    assert events[-1]["figures"]["predicted_acceptance_length"] >= 1


def test_states_that_are_not_finite_name_step_and_sample(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training(tmp_path, store, train_samples=6, validation_samples=2, processes=1)
    trainer = make_trainer(training)
    read = trainer.reader.read

    def read_broken(sample_id: str) -> torch.Tensor:
        states = read(sample_id).clone()
        if sample_id == "prompt-3/0":
            states[4, 0, 0] = float("nan")
        return states

    monkeypatch.setattr(trainer.reader, "read", read_broken)
    with pytest.raises(TrainingError, match=r"loss is not finite at step \d+ \(epoch 0\).*of prompt-3/0 have"):
        trainer.run()


def test_layers_other_than_the_jobs_are_refused(tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=2, validation_samples=1)
    with pytest.raises(TrainingError, match=rf"layers \[1, 2, 3, {LAYERS}\], but training needs \[0, 2, 3, {LAYERS}\]"):
        make_trainer(training, layers=[0, 2, 3])


@pytest.mark.parametrize(("train_samples", "validation_samples", "split"), [(0, 2, "train"), (2, 0, "validation")])
def test_a_split_without_samples_is_refused(
    tmp_path: Path, store: Store, train_samples: int, validation_samples: int, split: str
) -> None:
    training = make_training(tmp_path, store, train_samples, validation_samples)
    with pytest.raises(TrainingError, match=f"no {split} samples"):
        make_trainer(training)


def test_the_embedding_is_frozen_and_the_head_is_trained(tmp_path: Path, store: Store) -> None:
    training = make_training(tmp_path, store, train_samples=6, validation_samples=2, processes=1, epochs=1)
    trainer = make_trainer(training)
    embedding, head = trainer.drafter.embed_tokens.clone(), trainer.drafter.lm_head.weight.clone()
    trainer.run()
    assert torch.equal(trainer.drafter.embed_tokens, embedding)
    assert not torch.equal(trainer.drafter.lm_head.weight, head)
    assert not any("embed" in name for name in trainer.parameters)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    config = TrainConfig(learning_rate=2.0, warmup_fraction=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == pytest.approx(2.0)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(0, 1, TrainConfig(learning_rate=2.0, warmup_fraction=0.0)) == pytest.approx(2.0)


def test_norms_are_not_decayed() -> None:
    parameters = {"a": torch.nn.Parameter(torch.ones(2, 2)), "norm": torch.nn.Parameter(torch.ones(2))}
    decay = {
        id(p): group["weight_decay"]
        for group in make_optimizer(parameters, TrainConfig(weight_decay=0.3)).param_groups
        for p in group["params"]
    }
    assert decay == {id(parameters["a"]): 0.3, id(parameters["norm"]): 0.0}


def test_figures_follow_from_the_sums() -> None:
    sums = StepSums(2)
    sums.add(torch.tensor([[8.0, 3.0], [10.0, 8.0], [5.0, 2.0], [10.0, 4.0], [5.0, 1.0]]))
    figures = sums.figures(torch.tensor([1.0, 0.5]))
    assert figures["loss"] == pytest.approx(0.8 + 0.5 * 0.375)
    assert (figures["accuracy_step_0"], figures["accuracy_step_1"]) == (0.5, 0.25)
    assert (figures["conditional_accuracy_step_0"], figures["conditional_accuracy_step_1"]) == (0.5, 0.25)
    assert sums.predicted_acceptance_length() == pytest.approx(1 + 0.5 + 0.5 * 0.25)
    assert StepSums(3).predicted_acceptance_length() == 1.0
