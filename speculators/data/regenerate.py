"""Regeneration: the verifier answers every prompt, and its own tokens are kept exactly as vLLM generated them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from speculators.config import RetrainConfig
from speculators.data.prompts import Prompt, load_prompts
from speculators.errors import PipelineError, ServingError
from speculators.manifest import Manifest, StagePlan
from speculators.progress import Progress
from speculators.serving.client import VllmClient
from speculators.store import Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
CONVERSATIONS_FILE = "conversations.parquet"
RequestFields = Callable[[str, str], Mapping[str, Any]]
_TOKEN_COLUMNS = ("prompt_token_ids", "token_ids")
_PARTS = "parts"
_PART_NAME = re.compile(r"/part-(?P<number>\d+)-(?P<digest>[0-9a-f]{16})\.parquet$")
_PART_SIZE, _PART_INTERVAL_S = 25, 15.0
# How vLLM words it that a prompt leaves no room: vllm/renderers/params.py, entrypoints/serve/utils/api_utils.py,
# v1/engine/input_processor.py, and sampling_params.py when the prompt fills the context to its last token.
_TOO_LONG = re.compile(r"maximum (context|model) length|max_tokens must be at least 1")


@dataclass(frozen=True)
class Answer:
    """One regenerated turn; the columns of conversations.parquet.

    Attributes:
        sample_id: ``<prompt_id>/<turn>``.
        messages: JSON of the messages that were sent.
        prompt_token_ids: The prompt as vLLM saw it, chat template applied.
        token_ids: What vLLM generated, stop token included; empty where the prompt left no room.
        finish_reason: ``stop``, ``length``, or ``too_long`` for a turn that could not be asked.
    """

    sample_id: str
    prompt_id: str
    turn: int
    messages: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str


def regenerate(
    config: RetrainConfig,
    plan: StagePlan,
    store: Store,
    verifier: Verifier,
    endpoints: list[str],
    progress: Progress,
    request_fields: RequestFields = lambda prompt_id, sample_id: {},
) -> Manifest:
    """Answer all prompts, several at once, and keep what is finished in parts so that a killed run goes on from there.

    A later turn's request carries the regenerated answers of the earlier ones. Every (prompt, turn) is in the result
    exactly once, in the order of the prompts file.

    Args:
        endpoints: Base URLs of vLLM servers of the verifier.
        request_fields: Further fields of a sample's request, by its prompt's id and its own.

    Raises:
        DataError: The prompts cannot be used.
        ServingError: vLLM failed for good; what was finished is kept.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    prompts = load_prompts(config.regenerate.prompts, config.regenerate.max_prompts)
    parts = _Parts(store, plan, prompts)
    resumed = len(parts.answers)
    if resumed:
        logger.info("Going on: %d answers are there already.", resumed)
    turns = sum(len(prompt.turns) for prompt in prompts)
    progress.start("regenerate", turns, "answers")
    started = time.monotonic()
    try:
        asyncio.run(_answer_all(config, prompts, verifier, endpoints, parts, progress, request_fields))
    finally:
        progress.finish()
    seconds = time.monotonic() - started

    answers = [
        answer
        for prompt in prompts
        for turn in range(len(prompt.turns))
        if (answer := parts.answers.get(f"{prompt.prompt_id}/{turn}")) is not None
    ]
    store.write_bytes(plan.path(CONVERSATIONS_FILE), _to_parquet(answers))
    reasons = Counter(answer.finish_reason for answer in answers)
    generated = sum(len(answer.token_ids) for answer in answers)
    manifest = plan.complete(
        store,
        {CONVERSATIONS_FILE: None},
        {
            "samples": len(answers),
            "prompts": len(prompts),
            "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in answers),
            "generated_tokens": generated,
            "tokens_per_s": round(parts.generated / seconds, 2) if parts.generated else None,
            "truncated": reasons["length"],
            "skipped_too_long": turns - len(answers) + reasons["too_long"],
            "empty": sum(not answer.text.strip() for answer in answers if answer.finish_reason != "too_long"),
            "resumed_samples": resumed,
        },
    )
    store.delete(plan.path(_PARTS))
    return manifest


async def _answer_all(
    config: RetrainConfig,
    prompts: list[Prompt],
    verifier: Verifier,
    endpoints: list[str],
    parts: _Parts,
    progress: Progress,
    request_fields: RequestFields,
) -> None:
    section = config.regenerate
    started = time.monotonic()
    not_asked = 0
    waiting = asyncio.Queue[Prompt]()
    for prompt in prompts:
        waiting.put_nowait(prompt)

    async def work(client: VllmClient) -> None:
        nonlocal not_asked
        while not waiting.empty():
            prompt = waiting.get_nowait()
            for turn in range(len(prompt.turns)):
                sample_id = _sample_id(prompt, turn)
                if sample_id not in parts.answers:
                    fields = request_fields(prompt.prompt_id, sample_id)
                    parts.add(await _answer(client, config, prompt, turn, verifier, parts.answers, fields))
                stopped = parts.answers[sample_id].finish_reason == "too_long"
                if stopped:
                    not_asked += len(prompt.turns) - turn - 1
                rate = parts.generated / (time.monotonic() - started)
                progress.update(len(parts.answers) + not_asked, tokens_per_s=round(rate, 1))
                if stopped:
                    break

    async with VllmClient(endpoints, section.concurrency, section.request_timeout_s, section.max_retries) as client:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(section.concurrency * len(endpoints)):
                    tasks.create_task(work(client))
        except ExceptionGroup as group:
            # Whoever calls wants the one reason, not the group of all requests that failed for it.
            raise next((e for e in group.exceptions if isinstance(e, PipelineError)), group) from None
        finally:
            parts.flush()


async def _answer(
    client: VllmClient,
    config: RetrainConfig,
    prompt: Prompt,
    turn: int,
    verifier: Verifier,
    answers: Mapping[str, Answer],
    request_fields: Mapping[str, Any],
) -> Answer:
    """Ask one turn; a prompt without room for an answer becomes an empty one, marked ``too_long``."""
    messages = _messages(prompt, turn, answers)
    section, sample_id = config.regenerate, _sample_id(prompt, turn)
    sampling: dict[str, Any] = {"temperature": section.temperature, "top_p": section.top_p, **request_fields}
    if section.temperature > 0:
        sampling["seed"] = section.seed + int(hashlib.sha256(sample_id.encode()).hexdigest()[:6], 16)
    facts = (sample_id, prompt.prompt_id, turn, _as_json(messages))
    try:
        done = await client.chat(messages, max_tokens=section.max_tokens, **sampling)
    except ServingError as error:
        if not _TOO_LONG.search(str(error)):
            raise
        # Without max_tokens vLLM generates as far as there is room. 0.32 lowers max_tokens by itself; others refuse.
        try:
            done = await client.chat(messages, **sampling)
        except ServingError as second:
            if not _TOO_LONG.search(str(second)):
                raise
            return Answer(*facts, [], [], "", "too_long")
    largest = max((*done.prompt_token_ids, *done.token_ids), default=0)
    if largest >= verifier.vocab_size:
        raise ServingError(
            f"The endpoint answered with token id {largest}, but {verifier.source} has {verifier.vocab_size} tokens."
            " Check that serving.endpoints serve the model of verifier.model."
        )
    return Answer(*facts, done.prompt_token_ids, done.token_ids, done.text, done.finish_reason)


def _sample_id(prompt: Prompt, turn: int) -> str:
    return f"{prompt.prompt_id}/{turn}"


def _messages(prompt: Prompt, turn: int, answers: Mapping[str, Answer]) -> list[dict[str, str]]:
    """What is sent for a turn: the system message, and the earlier turns with the verifier's answers between."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for earlier in range(turn):
        messages += [
            {"role": "user", "content": prompt.turns[earlier]},
            {"role": "assistant", "content": answers[_sample_id(prompt, earlier)].text},
        ]
    return [*messages, {"role": "user", "content": prompt.turns[turn]}]


def _as_json(messages: list[dict[str, str]]) -> str:
    return json.dumps(messages, ensure_ascii=False)


class _Parts:
    """Finished answers, also in the store: a few at a time, each part written atomically."""

    def __init__(self, store: Store, plan: StagePlan, prompts: list[Prompt]) -> None:
        self._store, self._folder = store, plan.path(_PARTS)
        self.answers: dict[str, Answer] = {}
        self.generated = 0
        self._pending: list[Answer] = []
        self._written = time.monotonic()
        self._number = 0
        read: dict[str, Answer] = {}
        for path in store.list(self._folder):
            if (name := _PART_NAME.search(path)) is None:
                continue
            self._number = int(name["number"]) + 1
            data = store.read_bytes(path)
            if _part_digest(data) != name["digest"]:
                logger.warning("%s is damaged; its samples are asked for again.", store.url_of(path))
                store.delete(path)
                continue
            read.update((answer.sample_id, answer) for answer in _from_parquet(data))
        for prompt in prompts:
            self._keep_usable(prompt, read)

    def _keep_usable(self, prompt: Prompt, read: Mapping[str, Answer]) -> None:
        """Take over a conversation up to the first turn that is missing or that followed other answers than these.

        The latter happens when the part with an earlier turn was lost and the verifier worded it differently then.
        """
        for turn in range(len(prompt.turns)):
            answer = read.get(_sample_id(prompt, turn))
            if answer is None or answer.messages != _as_json(_messages(prompt, turn, self.answers)):
                return
            self.answers[answer.sample_id] = answer

    def add(self, answer: Answer) -> None:
        self.answers[answer.sample_id] = answer
        self.generated += len(answer.token_ids)
        self._pending.append(answer)
        if len(self._pending) >= _PART_SIZE or time.monotonic() - self._written > _PART_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write what is not in the store yet."""
        if self._pending:
            data = _to_parquet(self._pending)
            self._store.write_bytes(f"{self._folder}/part-{self._number:06d}-{_part_digest(data)}.parquet", data)
            self._number += 1
            self._pending = []
        self._written = time.monotonic()


def _part_digest(data: bytes) -> str:
    """Carried by a part's name, because Parquet's own checksums leave its headers out."""
    return hashlib.sha256(data).hexdigest()[:16]


def _to_parquet(answers: list[Answer]) -> bytes:
    rows = [
        {**asdict(answer), **{name: np.asarray(getattr(answer, name), dtype=np.int32) for name in _TOKEN_COLUMNS}}
        for answer in answers
    ]
    buffer = io.BytesIO()
    pd.DataFrame(rows).to_parquet(buffer, index=False)
    return buffer.getvalue()


def _from_parquet(data: bytes) -> list[Answer]:
    frame = pd.read_parquet(io.BytesIO(data))
    answers = []
    for row in frame.to_dict("records"):
        values = {str(name): value for name, value in row.items()}
        values.update({name: values[name].tolist() for name in _TOKEN_COLUMNS})
        answers.append(Answer(**values))
    return answers
