"""Regeneration: the verifier answers every prompt, and its own tokens are kept exactly as vLLM generated them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import time
from dataclasses import asdict, dataclass

import pandas as pd

from speculators.config import RetrainConfig
from speculators.data.prompts import Prompt, load_prompts
from speculators.errors import ServingError
from speculators.manifest import Manifest, StagePlan
from speculators.progress import Progress
from speculators.serving.client import VllmClient
from speculators.store import Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
CONVERSATIONS_FILE = "conversations.parquet"
_PARTS = "parts"
_PART_SIZE, _PART_INTERVAL_S = 25, 15.0
# Left for the chat template's own tokens when a prompt's length is not known before it is sent.
_TOO_LONG = "maximum context length"


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
) -> Manifest:
    """Answer all prompts, several at once, and keep what is finished in parts so that a killed run goes on from there.

    A later turn's request carries the regenerated answers of the earlier ones. Every (prompt, turn) is in the result
    exactly once, in the order of the prompts file.

    Args:
        endpoints: Base URLs of vLLM servers of the verifier.

    Raises:
        DataError: The prompts cannot be used.
        ServingError: vLLM failed for good; what was finished is kept.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    prompts = load_prompts(config.regenerate.prompts, config.regenerate.max_prompts)
    parts = _Parts(store, plan)
    resumed = len(parts.answers)
    if resumed:
        logger.info("Going on: %d answers are there already.", resumed)
    progress.start("regenerate", sum(len(prompt.turns) for prompt in prompts), "answers")
    started = time.monotonic()
    asyncio.run(_answer_all(config, prompts, endpoints, parts, progress))
    seconds = time.monotonic() - started
    progress.finish()

    answers = [
        answer
        for prompt in prompts
        for turn in range(len(prompt.turns))
        if (answer := parts.answers.get(f"{prompt.prompt_id}/{turn}")) is not None
    ]
    store.write_bytes(plan.path(CONVERSATIONS_FILE), _to_parquet(answers))
    reasons = pd.Series([answer.finish_reason for answer in answers]).value_counts()
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
            "truncated": int(reasons.get("length", 0)),
            "skipped_too_long": int(reasons.get("too_long", 0)),
            "empty": sum(not answer.token_ids for answer in answers),
            "resumed_samples": resumed,
        },
    )
    store.delete(plan.path(_PARTS))
    return manifest


async def _answer_all(
    config: RetrainConfig, prompts: list[Prompt], endpoints: list[str], parts: _Parts, progress: Progress
) -> None:
    section = config.regenerate
    started = time.monotonic()
    waiting = asyncio.Queue[Prompt]()
    for prompt in prompts:
        waiting.put_nowait(prompt)

    async def work(client: VllmClient) -> None:
        while not waiting.empty():
            prompt = waiting.get_nowait()
            for turn in range(len(prompt.turns)):
                sample_id = f"{prompt.prompt_id}/{turn}"
                if sample_id not in parts.answers:
                    answer = await _answer(client, config, prompt, turn, parts)
                    parts.add(answer)
                rate = parts.generated / (time.monotonic() - started)
                progress.update(len(parts.answers), tokens_per_s=round(rate, 1))
                if parts.answers[sample_id].finish_reason == "too_long":
                    break

    async with VllmClient(endpoints, section.concurrency, section.request_timeout_s, section.max_retries) as client:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(section.concurrency * len(endpoints)):
                    tasks.create_task(work(client))
        except* ServingError as group:
            raise group.exceptions[0] from None
        finally:
            parts.flush()


async def _answer(client: VllmClient, config: RetrainConfig, prompt: Prompt, turn: int, parts: _Parts) -> Answer:
    """Ask one turn; a prompt without room for an answer becomes an empty one, marked ``too_long``."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for earlier in range(turn):
        answered = parts.answers[f"{prompt.prompt_id}/{earlier}"]
        messages += [
            {"role": "user", "content": prompt.turns[earlier]},
            {"role": "assistant", "content": answered.text},
        ]
    messages.append({"role": "user", "content": prompt.turns[turn]})
    section, sample_id = config.regenerate, f"{prompt.prompt_id}/{turn}"
    sampling = {"temperature": section.temperature, "top_p": section.top_p}
    if section.temperature > 0:
        sampling["seed"] = section.seed + int(hashlib.sha256(sample_id.encode()).hexdigest()[:6], 16)
    facts = (sample_id, prompt.prompt_id, turn, json.dumps(messages, ensure_ascii=False))
    max_tokens = section.max_tokens
    while True:
        try:
            done = await client.chat(messages, max_tokens=max_tokens, **sampling)
        except ServingError as error:
            if _TOO_LONG not in str(error):
                raise
            if max_tokens <= 1:
                return Answer(*facts, [], [], "", "too_long")
            max_tokens //= 2
            continue
        return Answer(*facts, done.prompt_token_ids, done.token_ids, done.text, done.finish_reason)


class _Parts:
    """Finished answers, also in the store: a few at a time, each part written atomically."""

    def __init__(self, store: Store, plan: StagePlan) -> None:
        self._store, self._folder = store, plan.path(_PARTS)
        self.answers: dict[str, Answer] = {}
        self.generated = 0
        self._pending: list[Answer] = []
        self._written = time.monotonic()
        self._number = 0
        for path in store.list(self._folder):
            self._number = max(self._number, int(path.rpartition("-")[2].removesuffix(".parquet")) + 1)
            try:
                rows = pd.read_parquet(io.BytesIO(store.read_bytes(path))).to_dict("records")
                read = [_from_row(row) for row in rows]
            except (ValueError, OSError, KeyError, TypeError) as error:
                logger.warning("%s is damaged (%s); its samples are asked for again.", store.url_of(path), error)
                continue
            self.answers.update((answer.sample_id, answer) for answer in read)

    def add(self, answer: Answer) -> None:
        self.answers[answer.sample_id] = answer
        self.generated += len(answer.token_ids)
        self._pending.append(answer)
        if len(self._pending) >= _PART_SIZE or time.monotonic() - self._written > _PART_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write what is not in the store yet."""
        if self._pending:
            name = f"{self._folder}/part-{self._number:06d}.parquet"
            self._store.write_bytes(name, _to_parquet(self._pending))
            self._number += 1
            self._pending = []
        self._written = time.monotonic()


def _to_parquet(answers: list[Answer]) -> bytes:
    buffer = io.BytesIO()
    pd.DataFrame([asdict(answer) for answer in answers]).to_parquet(buffer, index=False)
    return buffer.getvalue()


def _from_row(row: dict) -> Answer:
    tokens = {name: [int(t) for t in row[name]] for name in ("prompt_token_ids", "token_ids")}
    return Answer(**{**row, **tokens, "turn": int(row["turn"])})
