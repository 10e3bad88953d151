from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from speculators.config import EvaluateConfig, RetrainConfig, TrainConfig
from speculators.data.prepare import EvaluationPrompt
from speculators.errors import CheckpointError, ConfigError, DataError, MissingStageError, ServingError
from speculators.evaluation import evaluate as module
from speculators.evaluation.evaluate import check_drafter, evaluate
from speculators.evaluation.reference import ReferenceResult
from speculators.manifest import Manifest, Stage, StagePlan
from speculators.progress import Progress
from speculators.store import Store
from speculators.verifier import Verifier
from tests.evaluation.fake_vllm import FakeVllm, Rule, counting_up, fake_vllm

PROMPTS = [EvaluationPrompt(f"p{n}/0", f"p{n}", np.array([n, 100 * (n + 1)], np.int32)) for n in range(5)]


class Bench:
    """An evaluation against fake servers, with everything that it needs in place."""

    def __init__(self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.folder = store, folder
        self.drafter_dir = folder / "drafter"
        self.drafter_dir.mkdir()
        model = folder / "model"
        model.mkdir()
        self.verifier = Verifier(model, "model", None, "f00d", {}, [])
        self.write_drafter_config(tokens=2, verifier=str(model))
        self.config = RetrainConfig(
            work_dir=str(folder),
            train=TrainConfig(ttt_steps=2),
            evaluate=EvaluateConfig(num_speculative_tokens=2, max_tokens=8, concurrency=2, reference_prompts=0),
        )
        self.prepare_plan = StagePlan(Stage.PREPARE, {})
        self.prepare_plan.complete(store, {}, {})
        self.with_rule: Rule = counting_up
        self.without_rule: Rule = counting_up
        self.logprobs: dict[int, float] = {}
        self.started: list[str] = []
        self.running = 0
        self.prompts = PROMPTS
        self.fail_in_reference_after: int | None = None
        monkeypatch.setattr(module, "VllmServer", self.server)
        monkeypatch.setattr(module, "load_held_out", lambda *_: self.prompts)
        monkeypatch.setattr(module, "decode_prompts", self.decode_prompts)

    def write_drafter_config(self, tokens: int, verifier: str) -> None:
        section = {"proposal_methods": [{"speculative_tokens": tokens}], "verifier": {"name_or_path": verifier}}
        (self.drafter_dir / "config.json").write_text(
            json.dumps({"speculators_model_type": "eagle3", "speculators_config": section})
        )

    @contextmanager
    def server(self, serving: Any, model: Path, work_dir: Path, **options: Any) -> Iterator[Any]:
        self.started.append(options["name"])
        self.running += 1
        assert self.running == 1, "two servers at once"
        rule = self.with_rule if model == self.drafter_dir else self.without_rule
        with fake_vllm(rule, self.logprobs) as fake:
            fake.command = ["python", "--model", str(model)]  # type: ignore[attr-defined]
            yield fake
        self.running -= 1

    def decode_prompts(self, *args: Any) -> None:
        """Stands in for the reference decoder: two drafts a prompt, three tokens accepted."""
        assert self.running == 0
        prompts, limits, results, save = args[3], args[4], args[-2], args[-1]
        self.started.append(f"reference-{len(prompts)}")
        for prompt in prompts:
            if self.fail_in_reference_after == len(results):
                raise KeyboardInterrupt
            tokens = counting_up(prompt.prompt_token_ids.tolist(), limits[prompt.sample_id])
            results[prompt.sample_id] = ReferenceResult(tokens, 2, 3, [2, 1])
            save()

    def plan(self) -> StagePlan:
        return StagePlan(Stage.EVALUATE, {"parameters": self.config.evaluate.model_dump()})

    def run(self, **options: Any) -> Manifest:
        return evaluate(
            self.config,
            self.plan(),
            self.prepare_plan,
            self.drafter_dir,
            self.store,
            self.verifier,
            Progress(),
            **options,
        )

    def configure(self, **values: Any) -> None:
        self.config = self.config.model_copy(update={"evaluate": self.config.evaluate.model_copy(update=values)})

    def rows(self) -> pd.DataFrame:
        return pd.read_parquet(io.BytesIO(self.store.read_bytes(self.plan().path("prompts.parquet"))))


@pytest.fixture
def bench(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(store, tmp_path, monkeypatch)


def test_figures_and_files(bench: Bench) -> None:
    manifest = bench.run()
    figures = manifest.figures
    assert (figures["drafts"], figures["accepted_tokens"], figures["draft_tokens"]) == (20, 20, 40)
    assert figures["acceptance_length"] == pytest.approx(2.0)
    assert figures["per_position_acceptance"] == [1.0, 0.0]
    assert (figures["identical_share"], figures["divergences"], figures["not_near_tie"]) == (1.0, 0, 0)
    assert not figures["counters_disturbed"]
    assert figures["throughput_ratio"] == pytest.approx(figures["tokens_per_s_with"] / figures["tokens_per_s_without"])
    assert set(manifest.outputs) == {"results.json", "prompts.parquet", "acceptance.png"}
    results = bench.store.read_json(bench.plan().path("results.json"))
    assert results["figures"]["acceptance_length"] == pytest.approx(2.0)
    assert results["with_drafter"]["acceptance"]["drafts"] == 20
    assert bench.store.read_bytes(bench.plan().path("acceptance.png")).startswith(b"\x89PNG")
    assert bench.rows()["sample_id"].tolist() == [prompt.sample_id for prompt in PROMPTS]
    assert not [path for path in bench.store.list(bench.plan().directory) if "partial" in path]


def test_finished_evaluation_starts_nothing(bench: Bench) -> None:
    first = bench.run()
    bench.started.clear()
    assert bench.run() == first
    assert bench.started == []


def test_divergence_is_reported_with_its_proof(bench: Bench) -> None:
    def other(prompt: list[int], max_tokens: int) -> list[int]:
        tokens = counting_up(prompt, max_tokens)
        return [*tokens[:3], 7, *tokens[4:]] if prompt == PROMPTS[1].prompt_token_ids.tolist() else tokens

    bench.without_rule, bench.logprobs = other, {204: -0.700, 7: -0.699}
    figures = bench.run().figures
    assert (figures["divergences"], figures["near_ties"], figures["not_near_tie"]) == (1, 1, 0)
    assert figures["identical_share"] == pytest.approx(0.8)
    row = bench.rows().set_index("sample_id").loc["p1/0"]
    assert not row["identical"]
    assert (row["first_difference"], row["near_tie"]) == (3, True)
    assert row["gap"] == pytest.approx(0.001)
    [shown] = bench.store.read_json(bench.plan().path("results.json"))["divergences"]
    assert (shown["with_token"], shown["without_token"]) == (204, 7)


def test_divergence_without_near_tie_is_loud(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.without_rule = lambda prompt, n: [token + 1 for token in counting_up(prompt, n)]
    bench.logprobs = {1: -0.1, 2: -3.0}
    figures = bench.run().figures
    assert figures["not_near_tie"] == 5
    assert "5 of 5 greedy outputs differ" in caplog.text


def test_reference_is_compared_on_its_own_prompts(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.configure(reference_prompts=2)
    figures = bench.run().figures
    assert figures["reference_prompts"] == 2
    assert figures["reference_acceptance_length"] == pytest.approx(2.5)
    assert figures["reference_relative_difference"] == pytest.approx(0.25)
    assert figures["reference_identical_share"] == 1.0
    assert "reference decoder's acceptance length differs" in caplog.text
    assert bench.rows()["reference_accepted"].tolist()[:2] == [3, 3]
    assert bench.rows()["reference_accepted"].isna().tolist() == [False, False, True, True, True]


def test_training_gap_is_reported(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    figures = bench.run(predicted_acceptance_length=2.5, predicted_per_position=[0.9, 0.6]).figures
    assert figures["training_gap"] == pytest.approx(-0.2)
    assert "training's validation predicted" in caplog.text


def test_small_training_gap_is_quiet(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.run(predicted_acceptance_length=2.05)
    assert "predicted" not in caplog.text


def test_interrupted_evaluation_redoes_only_the_unfinished_part(bench: Bench) -> None:
    bench.configure(reference_prompts=None)

    bench.fail_in_reference_after = 3
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert bench.started == ["vllm-with-drafter", "vllm-without-drafter", "reference-5"]
    assert bench.plan().finished(bench.store) is None

    bench.started.clear()
    bench.fail_in_reference_after = None
    manifest = bench.run()
    assert bench.started == ["reference-2"]
    assert manifest.figures["reference_prompts"] == 5


def test_death_of_a_server_is_explained(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(_: Any) -> None:
        raise ServingError("vLLM died: out of memory")

    monkeypatch.setattr(FakeVllm, "check_alive", dead, raising=False)
    monkeypatch.setattr(FakeVllm, "metrics", lambda _: "nothing")
    with pytest.raises(ServingError, match="out of memory"):
        bench.run()


def test_prompts_without_room_are_left_out(bench: Bench) -> None:
    bench.prompts = [*PROMPTS, EvaluationPrompt("long/0", "long", np.ones(1023, np.int32))]
    figures = bench.run().figures
    assert (figures["held_out_prompts"], figures["prompts_too_long"]) == (5, 1)


def test_no_prompt_with_room_is_an_error(bench: Bench) -> None:
    bench.prompts = [EvaluationPrompt("long/0", "long", np.ones(1023, np.int32))]
    with pytest.raises(DataError, match="max_model_len"):
        bench.run()


def test_other_number_of_speculative_tokens_is_an_error(bench: Bench) -> None:
    bench.configure(num_speculative_tokens=4)
    with pytest.raises(ConfigError, match=r"is 4, but the drafter .* proposes 2"):
        bench.run()


def test_drafter_of_another_verifier_is_an_error(bench: Bench) -> None:
    bench.write_drafter_config(tokens=2, verifier="/elsewhere/model")
    with pytest.raises(CheckpointError, match="/elsewhere/model"):
        bench.run()


@pytest.mark.parametrize("content", ["{", "{}", '{"speculators_config": {"proposal_methods": []}}'])
def test_unusable_drafter_config_is_an_error(bench: Bench, content: str) -> None:
    (bench.drafter_dir / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_drafter(bench.drafter_dir, bench.config, bench.verifier)


def test_missing_dataset_is_an_error(bench: Bench) -> None:
    bench.prepare_plan = StagePlan(Stage.PREPARE, {"other": 1})
    with pytest.raises(MissingStageError, match="prepare-data"):
        bench.run()
