"""Acceptance, throughput and losslessness: what a running vLLM server does with a set of prompts.

Acceptance comes from the difference of vLLM's own counters around the run: what vLLM accepted, not an estimate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from speculators.data.prepare import EvaluationPrompt
from speculators.errors import ServingError
from speculators.progress import Progress
from speculators.serving.client import VllmClient
from speculators.serving.metrics import SpecDecodeCounters, read_counters

logger = logging.getLogger(__name__)

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "ignore_eos": False}
_SETTLE_TIMEOUT_S, _SETTLE_POLL_S = 10.0, 0.1
_SHOWN_LOGPROBS = 5
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Acceptance:
    """Counts of drafted and accepted tokens.

    Attributes:
        drafts: Verification steps that had a draft to verify.
        draft_tokens: Tokens proposed in them.
        accepted_tokens: Proposed tokens that the verifier would have chosen too.
        accepted_per_position: How often the draft's token at position k was accepted, k from 0.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @classmethod
    def from_counters(cls, counters: SpecDecodeCounters) -> Acceptance:
        """Take the speculative-decoding part of vLLM's counters."""
        return cls(
            int(counters.drafts),
            int(counters.draft_tokens),
            int(counters.accepted_tokens),
            tuple(int(n) for n in counters.accepted_per_position),
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        width = max(len(self.accepted_per_position), len(other.accepted_per_position))
        mine, others = (
            (*counts, *[0] * (width - len(counts)))
            for counts in (self.accepted_per_position, other.accepted_per_position)
        )
        return Acceptance(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            tuple(a + b for a, b in zip(mine, others, strict=True)),
        )

    @property
    def length(self) -> float:
        """Tokens emitted per verification step, the bonus token counted: ``1 + accepted / drafts``."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def rate(self) -> float:
        """Accepted share of the proposed tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def per_position(self) -> list[float]:
        """P(token k of a draft accepted), k from 0, over all drafts."""
        return [accepted / self.drafts if self.drafts else 0.0 for accepted in self.accepted_per_position]

    def figures(self) -> dict[str, Any]:
        """Counts and the ratios made from them."""
        return {
            **asdict(self),
            "acceptance_length": self.length,
            "acceptance_rate": self.rate,
            "per_position_acceptance": self.per_position,
        }


@dataclass
class ServerRun:
    """What one server answered, how long it took, and what its counters say.

    Attributes:
        outputs: Generated token ids (stop token included) by sample.
        finish_reasons: Why each sample's generation ended, by sample.
        seconds: Wall time from the first request to the last answer.
        acceptance: Sum over all groups of prompts.
        group_acceptance: One for each group of prompts, in the order given.
        disturbances: Signs that the counters hold work that was not ours; empty when they can be trusted.
    """

    outputs: dict[str, list[int]] = field(default_factory=dict)
    finish_reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    acceptance: Acceptance = Acceptance()
    group_acceptance: list[Acceptance] = field(default_factory=list)
    disturbances: list[str] = field(default_factory=list)

    @property
    def generated_tokens(self) -> int:
        """Tokens generated for all prompts together."""
        return sum(len(tokens) for tokens in self.outputs.values())

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON values that :meth:`from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ServerRun:
        """Read back what :meth:`to_json` gave."""
        return cls(
            **{
                **value,
                "acceptance": _acceptance_from_json(value["acceptance"]),
                "group_acceptance": [_acceptance_from_json(v) for v in value["group_acceptance"]],
            }
        )


def _acceptance_from_json(value: Mapping[str, Any]) -> Acceptance:
    return Acceptance(**{**value, "accepted_per_position": tuple(value["accepted_per_position"])})


@dataclass(frozen=True)
class Divergence:
    """The first position at which a sample's outputs with and without the drafter differ.

    Attributes:
        sample_id: The sample.
        position: Index into the generated tokens.
        with_token: Token chosen with the drafter; None when that output ends before.
        without_token: Token chosen without; None when that output ends before.
        top: The verifier's most likely tokens there with their log-probabilities, best first.
        gap: How far the less likely of both tokens lies below the verifier's best, in nats. None: at least one is not
            among ``top``, so the gap is larger than what ``top`` spans.
        near_tie: The gap is below the configured threshold, so rounding decides which of both is chosen.
    """

    sample_id: str
    position: int
    with_token: int | None
    without_token: int | None
    top: list[tuple[int, float]]
    gap: float | None
    near_tie: bool


def max_new_tokens(prompt_length: int, max_tokens: int, num_speculative_tokens: int, max_model_len: int) -> int:
    """Answer length for a prompt, such that no draft is ever cut short by the length limit.

    vLLM trims drafts near ``max_model_len`` (v1/core/sched/scheduler.py), and drafts nothing for the WHOLE batch once
    its longest sequence and K more tokens pass the limit (``_input_fits_in_drafter`` in
    v1/worker/gpu_model_runner.py). One step can run K tokens past ``max_tokens``, whence twice K.

    Returns:
        Tokens; below 1 when the prompt itself is too long.
    """
    return min(max_tokens, max_model_len - prompt_length - 2 * num_speculative_tokens - 2)


async def measure(
    url: str,
    groups: Sequence[Sequence[EvaluationPrompt]],
    limits: Mapping[str, int],
    concurrency: int,
    timeout_s: float,
    max_retries: int,
    progress: Progress,
    description: str,
) -> ServerRun:
    """Answer all prompts greedily and read the counters before and after each group.

    A warm-up request goes first and is not counted: it pays for first-time allocations and for code paths compiled on
    first use.

    Args:
        url: The server; nobody else may use it meanwhile.
        groups: Prompts, group by group; a group starts when the one before has finished.
        limits: Longest answer in tokens, by sample.
        concurrency: Requests in flight.
        timeout_s: Time-out of one request in seconds.
        max_retries: Retries of one request.
        description: Shown with the progress.

    Raises:
        ServingError: The server died or refused a request.
    """
    run = ServerRun()
    async with VllmClient([url], concurrency, timeout_s, max_retries) as client:
        first = next(prompt for group in groups for prompt in group)
        await client.complete(list(first.prompt_token_ids), max_tokens=_WARM_UP_TOKENS, **GREEDY)
        before = await _settled_counters(url, None)
        progress.start(description, sum(len(group) for group in groups), "prompts")
        done = 0
        for group in groups:
            started = time.perf_counter()

            async def answer(prompt: EvaluationPrompt) -> None:
                nonlocal done
                completion = await client.complete(
                    list(prompt.prompt_token_ids), max_tokens=limits[prompt.sample_id], **GREEDY
                )
                run.outputs[prompt.sample_id] = [int(token) for token in completion.token_ids]
                run.finish_reasons[prompt.sample_id] = completion.finish_reason
                done += 1
                rate = run.generated_tokens / (run.seconds + time.perf_counter() - started)  # noqa: B023
                progress.update(done, tokens_per_s=round(rate, 1))

            try:
                async with asyncio.TaskGroup() as tasks:
                    for prompt in group:
                        tasks.create_task(answer(prompt))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from failures
            run.seconds += time.perf_counter() - started
            after = await _settled_counters(url, before.request_success + len(group))
            difference = after - before
            run.disturbances += _disturbances(difference, group, run.outputs)
            run.group_acceptance.append(Acceptance.from_counters(difference))
            before = after
    progress.finish()
    run.acceptance = sum(run.group_acceptance, Acceptance())
    return run


async def _settled_counters(url: str, expected_requests: float | None) -> SpecDecodeCounters:
    """Counters once they include every finished request: vLLM updates them just after it sends an answer."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    last: SpecDecodeCounters | None = None
    while True:
        counters = await asyncio.to_thread(read_counters, url)
        complete = expected_requests is None or counters.request_success >= expected_requests
        if (complete and counters == last) or time.monotonic() > deadline:
            return counters
        last = counters
        await asyncio.sleep(_SETTLE_POLL_S)


def _disturbances(
    difference: SpecDecodeCounters, group: Sequence[EvaluationPrompt], outputs: Mapping[str, list[int]]
) -> list[str]:
    """Compare the counters with what we sent and received."""
    found = []
    if int(difference.request_success) != len(group):
        found.append(f"vLLM counted {int(difference.request_success)} finished requests; {len(group)} were sent")
    generated = sum(len(outputs[prompt.sample_id]) for prompt in group)
    if int(difference.generation_tokens) != generated:
        found.append(f"vLLM counted {int(difference.generation_tokens)} generated tokens; {generated} were received")
    for text in found:
        logger.warning(
            "The evaluation's counters are disturbed: %s. Another client used the server, or requests were retried;"
            " acceptance and tokens/s may be off.",
            text,
        )
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index at which two token sequences differ (the shorter one's length if it is the other's beginning)."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


async def find_divergences(
    url: str,
    prompts: Iterable[EvaluationPrompt],
    with_drafter: Mapping[str, Sequence[int]],
    without_drafter: Mapping[str, Sequence[int]],
    near_tie_logprob: float,
    timeout_s: float,
    max_retries: int,
) -> list[Divergence]:
    """Ask the plain server what the verifier thinks of both tokens wherever greedy outputs part.

    Args:
        url: The server WITHOUT the drafter.
        near_tie_logprob: Largest gap in nats that still counts as a near-tie.

    Raises:
        ServingError: The server died or refused a request.
    """
    found = []
    async with VllmClient([url], 1, timeout_s, max_retries) as client:
        for prompt in prompts:
            a, b = list(with_drafter[prompt.sample_id]), list(without_drafter[prompt.sample_id])
            position = first_difference(a, b)
            if position is None:
                continue
            completion = await client.complete(
                [*prompt.prompt_token_ids, *a[:position]],
                max_tokens=1,
                logprobs=_SHOWN_LOGPROBS,
                return_tokens_as_token_ids=True,
                **GREEDY,
            )
            top = top_logprobs(completion.logprobs)
            tokens = (a[position] if position < len(a) else None, b[position] if position < len(b) else None)
            gap = _gap(dict(top), tokens)
            near_tie = gap is not None and gap < near_tie_logprob
            found.append(Divergence(prompt.sample_id, position, *tokens, top, gap, near_tie))
            if not near_tie:
                logger.warning(
                    "Sample %s: greedy outputs with and without the drafter part at token %d (%s against %s) where the"
                    " verifier sees no near-tie (gap %s nats). Speculative decoding is NOT lossless here.",
                    prompt.sample_id,
                    position,
                    *tokens,
                    "unknown" if gap is None else f"{gap:.4f}",
                )
    return found


def _gap(logprobs: Mapping[int, float], tokens: tuple[int | None, int | None]) -> float | None:
    values = [logprobs[token] for token in tokens if token is not None and token in logprobs]
    return max(logprobs.values()) - min(values) if len(values) == len(tokens) else None


def top_logprobs(logprobs: Any) -> list[tuple[int, float]]:
    """Token ids and log-probabilities at the first generated position, best first.

    Args:
        logprobs: The completion API's ``logprobs`` object, asked for with ``return_tokens_as_token_ids``, whose keys
            are then ``token_id:<id>``.

    Raises:
        ServingError: The answer holds no such log-probabilities.
    """
    try:
        entries = logprobs["top_logprobs"][0].items()
        pairs = [(int(key.removeprefix("token_id:")), float(value)) for key, value in entries]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServingError(
            "vLLM's answer holds no log-probabilities by token id; serving.python must be vLLM 0.32 or newer."
        ) from error
    return sorted(pairs, key=lambda pair: -pair[1])
