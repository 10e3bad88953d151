from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from speculators.data.prepare import EvaluationPrompt
from speculators.errors import ServingError
from speculators.evaluation.acceptance import (
    Acceptance,
    ServerRun,
    find_divergences,
    first_difference,
    max_new_tokens,
    measure,
    top_logprobs,
)
from speculators.progress import Progress
from tests.evaluation.fake_vllm import FakeVllm, counting_up, fake_vllm


def make_prompt(n: int) -> EvaluationPrompt:
    return EvaluationPrompt(
        sample_id=f"p{n}/0", prompt_id=f"p{n}", prompt_token_ids=np.array([n, 100 * (n + 1)], np.int32)
    )


PROMPTS = [make_prompt(n) for n in range(6)]
LIMITS = {prompt.sample_id: 8 for prompt in PROMPTS}


def run_measure(server: FakeVllm, groups: list[list[EvaluationPrompt]] | None = None) -> ServerRun:
    return asyncio.run(measure(server.url, groups or [PROMPTS], LIMITS, 3, 30, 1, Progress(), "test"))


def test_acceptance_figures() -> None:
    acceptance = Acceptance(10, 30, 12, (7, 4, 1))
    assert acceptance.length == pytest.approx(2.2)
    assert acceptance.rate == pytest.approx(0.4)
    assert acceptance.per_position == [0.7, 0.4, 0.1]
    assert acceptance.length == pytest.approx(1 + sum(acceptance.per_position))


def test_acceptance_adds_up() -> None:
    assert Acceptance() + Acceptance(2, 4, 3, (2, 1)) + Acceptance(1, 2, 0, (0, 0)) == Acceptance(3, 6, 3, (2, 1))


def test_acceptance_without_drafts() -> None:
    assert (Acceptance().length, Acceptance().rate, Acceptance().per_position) == (1.0, 0.0, [])


def test_measure_counts_only_its_own_run() -> None:
    """Earlier traffic and the warm-up request are in the counters before, so they do not count."""
    with fake_vllm(counting_up) as server:
        server.count(50, 500)
        run = run_measure(server)
    assert run.outputs["p2/0"] == list(range(301, 309))
    assert run.generated_tokens == 48
    assert run.acceptance == Acceptance(24, 48, 24, (24, 0))
    assert run.disturbances == []
    assert run.tokens_per_s == pytest.approx(48 / run.seconds)
    assert len(server.requests) == len(PROMPTS) + 1


def test_measure_sends_token_ids_greedily_with_the_limit() -> None:
    with fake_vllm(counting_up) as server:
        run_measure(server)
    for request in server.requests[1:]:
        assert request["prompt"] in [prompt.prompt_token_ids.tolist() for prompt in PROMPTS]
        assert (request["temperature"], request["max_tokens"], request["ignore_eos"]) == (0.0, 8, False)


def test_measure_counts_groups_apart() -> None:
    with fake_vllm(counting_up) as server:
        run = run_measure(server, [PROMPTS[:2], PROMPTS[2:]])
    assert [group.drafts for group in run.group_acceptance] == [8, 16]
    assert run.acceptance.drafts == 24


def test_foreign_traffic_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with fake_vllm(counting_up) as server:

        def rule(prompt: list[int], max_tokens: int) -> list[int]:
            if prompt == PROMPTS[3].prompt_token_ids.tolist() and max_tokens == 8:
                server.count(5, 11)
            return counting_up(prompt, max_tokens)

        server.rule = rule
        run = run_measure(server)
    assert len(run.disturbances) == 2
    assert "7 finished requests; 6 were sent" in run.disturbances[0]
    assert "59 generated tokens; 48 were received" in run.disturbances[1]
    assert "disturbed" in caplog.text


def test_refused_request_is_one_clear_error() -> None:
    with fake_vllm(counting_up) as server:
        server.refuse = "too long"
        with pytest.raises(ServingError, match="too long"):
            run_measure(server)


def test_run_survives_json() -> None:
    with fake_vllm(counting_up) as server:
        run = run_measure(server)
    assert ServerRun.from_json(json.loads(json.dumps(run.to_json()))) == run


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None), ([1], [2], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected


def diverge(a: list[int], b: list[int], logprobs: dict[int, float], threshold: float = 0.05) -> tuple[list, FakeVllm]:
    with fake_vllm(counting_up, logprobs) as server:
        found = asyncio.run(find_divergences(server.url, PROMPTS[:1], {"p0/0": a}, {"p0/0": b}, threshold, 30, 1))
    return found, server


def test_identical_outputs_ask_nothing() -> None:
    found, server = diverge([1, 2, 3], [1, 2, 3], {})
    assert found == []
    assert server.requests == []


def test_near_tie_is_proven_at_the_first_difference() -> None:
    [divergence], server = diverge([5, 6, 7, 8], [5, 6, 9, 8], {9: -0.69, 7: -0.70, 3: -6.0})
    assert server.requests[0]["prompt"] == [*PROMPTS[0].prompt_token_ids.tolist(), 5, 6]
    assert (server.requests[0]["max_tokens"], server.requests[0]["logprobs"]) == (1, 5)
    assert (divergence.position, divergence.with_token, divergence.without_token) == (2, 7, 9)
    assert divergence.top == [(9, -0.69), (7, -0.70), (3, -6.0)]
    assert divergence.gap == pytest.approx(0.01)
    assert divergence.near_tie


def test_clear_difference_is_no_near_tie(caplog: pytest.LogCaptureFixture) -> None:
    [divergence], _ = diverge([5, 7], [5, 9], {9: -0.1, 7: -2.6})
    assert divergence.gap == pytest.approx(2.5)
    assert not divergence.near_tie
    assert "NOT lossless" in caplog.text


def test_two_unlikely_tokens_are_no_near_tie() -> None:
    """Both tokens alike, but far from the verifier's best: neither should have been chosen."""
    [divergence], _ = diverge([7], [9], {1: -0.01, 7: -5.0, 9: -5.01})
    assert divergence.gap == pytest.approx(5.0)
    assert not divergence.near_tie


@pytest.mark.parametrize("other", [[5, 42], [5]])
def test_token_out_of_the_top_or_missing_is_no_near_tie(other: list[int]) -> None:
    [divergence], _ = diverge([5, 7], other, {7: -0.1, 9: -2.6})
    assert divergence.gap is None
    assert not divergence.near_tie


def test_answer_without_logprobs_is_an_error() -> None:
    with pytest.raises(ServingError, match="log-probabilities"):
        top_logprobs(None)


def test_answers_leave_room_for_whole_drafts() -> None:
    assert max_new_tokens(100, 128, 3, 1024) == 128
    assert max_new_tokens(1000, 128, 3, 1024) == 16
    assert max_new_tokens(1020, 128, 3, 1024) < 1
