"""The reference decoder and the whole evaluation against real vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.checkpoints.speculators_format import load_drafter, read_config
from speculators.config import ServingConfig
from speculators.data.prepare import EvaluationPrompt
from speculators.evaluation.acceptance import Acceptance, ServerRun, find_divergences, max_new_tokens, measure
from speculators.evaluation.reference import reference_decode, stop_token_ids
from speculators.progress import Progress
from speculators.serving.vllm_server import VllmServer
from speculators.verifier import Verifier

pytestmark = pytest.mark.vllm

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from one to ten.",
    "Write a Python function that reverses a string.",
    "Name three primary colours.",
    "Explain why the sky is blue in two sentences.",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
]
MAX_TOKENS = 48
SERVING = ServingConfig(max_model_len=320, max_num_seqs=8, cpu_kv_cache_gib=1)


@pytest.fixture(scope="module")
def prompts(verifier: Verifier) -> list[EvaluationPrompt]:
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    made = []
    for n, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append(EvaluationPrompt(f"q{n}/0", f"q{n}", np.array(ids, np.int32)))
    return made


@pytest.fixture(scope="module")
def draft_length(trained_drafter: Path) -> int:
    return int(read_config(trained_drafter)["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


@pytest.fixture(scope="module")
def limits(prompts: list[EvaluationPrompt], draft_length: int) -> dict[str, int]:
    return {
        p.sample_id: max_new_tokens(len(p.prompt_token_ids), MAX_TOKENS, draft_length, SERVING.max_model_len)
        for p in prompts
    }


def run(server: VllmServer, groups: list[list[EvaluationPrompt]], limits: dict[str, int]) -> ServerRun:
    return asyncio.run(measure(server.url, groups, limits, 8, 300, 0, Progress(), "test"))


@pytest.fixture(scope="module")
def with_drafter(
    trained_drafter: Path,
    prompts: list[EvaluationPrompt],
    limits: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ServerRun, ServerRun]:
    """vLLM with the drafter's folder as its only model: prompts one by one (each a group), and all at once."""
    folder = tmp_path_factory.mktemp("with-drafter")
    arguments = ["--no-enable-prefix-caching"]
    with VllmServer(SERVING, trained_drafter, folder, name="with-drafter", extra_args=arguments) as server:
        return run(server, [[prompt] for prompt in prompts], limits), run(server, [prompts], limits)


def test_counters_hold_nothing_but_our_prompts(with_drafter: tuple[ServerRun, ServerRun]) -> None:
    one_by_one, at_once = with_drafter
    assert one_by_one.disturbances == at_once.disturbances == []
    assert len(one_by_one.group_acceptance) == len(QUESTIONS)
    assert at_once.acceptance.accepted_tokens > 0


def test_reference_decoder_counts_what_vllm_counts(
    with_drafter: tuple[ServerRun, ServerRun],
    trained_drafter: Path,
    verifier: Verifier,
    prompts: list[EvaluationPrompt],
    limits: dict[str, int],
    draft_length: int,
) -> None:
    """Prompt by prompt, drafts and accepted tokens at every position are the same wherever the answers are.

    One draft in a hundred may be decided by rounding, so a tenth of the prompts may differ.
    """
    one_by_one, _ = with_drafter
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()
    drafter, mapping, _ = load_drafter(trained_drafter, verifier.path)
    stop_ids = stop_token_ids(verifier.path, trust_remote_code=False)
    total, counted, exact = Acceptance(), Acceptance(), 0
    for prompt, vllm in zip(prompts, one_by_one.group_acceptance, strict=True):
        result = reference_decode(
            model,
            drafter.eval().proposer(None if mapping is None else mapping.kept_ids, draft_length),
            drafter.config.aux_layer_ids,
            prompt.prompt_token_ids.tolist(),
            draft_length,
            limits[prompt.sample_id],
            stop_ids,
            one_by_one.outputs[prompt.sample_id],
        )
        same = result.token_ids == one_by_one.outputs[prompt.sample_id]
        exact += same and result.acceptance == vllm
        total, counted = total + result.acceptance, counted + vllm
    assert exact >= len(prompts) - 1
    assert total.length == pytest.approx(counted.length, rel=0.03)


def test_greedy_outputs_are_those_of_plain_decoding(
    with_drafter: tuple[ServerRun, ServerRun],
    plain_server: VllmServer,
    prompts: list[EvaluationPrompt],
    limits: dict[str, int],
) -> None:
    """Identical, or parted at a near-tie that the plain server confirms."""
    plain = run(plain_server, [prompts], limits)
    _, at_once = with_drafter
    found = asyncio.run(find_divergences(plain_server.url, prompts, at_once.outputs, plain.outputs, 0.05, 300, 0))
    assert len(found) <= 1
    assert all(divergence.near_tie for divergence in found)


def test_log_probabilities_come_by_token_id(plain_server: VllmServer, prompts: list[EvaluationPrompt]) -> None:
    """A made-up divergence: the plain server shows the verifier's choice on top, the other token below or not."""
    prompt = prompts[0]
    [answer] = run(plain_server, [[prompt]], {prompt.sample_id: 4}).outputs.values()
    other = [*answer[:2], answer[2] + 1, *answer[3:]]
    [divergence] = asyncio.run(
        find_divergences(
            plain_server.url, [prompt], {prompt.sample_id: other}, {prompt.sample_id: answer}, 0.05, 300, 0
        )
    )
    assert divergence.position == 2
    assert divergence.top[0][0] == answer[2]
    assert len(divergence.top) >= 5
    assert not divergence.near_tie
