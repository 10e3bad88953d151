"""Prompts: read from JSON Lines, checked line by line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from speculators.errors import DataError

DEFAULT_PROMPTS = Path(__file__).with_name("default_prompts.jsonl")
_FORMS = '{"turns": ["first question", "follow-up", ...]}, {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]}'


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn; the verifier's answers go between.

    Attributes:
        prompt_id: Unique in its file.
        turns: The user's messages, at least one.
        system: System message, if any.
    """

    prompt_id: str
    turns: tuple[str, ...]
    system: str | None = None


def prompts_digest(path: str | None) -> str:
    """SHA-256 of the prompts file's content.

    Raises:
        DataError: It cannot be read.
    """
    return hashlib.sha256(_read(path)).hexdigest()


def load_prompts(path: str | None, limit: int | None = None) -> list[Prompt]:
    """Read prompts.

    Args:
        path: JSON Lines file or fsspec URL; None for the prompts that come with the project.
        limit: Only the first so many.

    Raises:
        DataError: The file is missing or empty, or a line is not a prompt; names file, line and reason.
    """
    where = path or str(DEFAULT_PROMPTS.name)
    try:
        lines = _read(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}).") from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _parse(json.loads(line), number)
        except ValueError as error:
            raise DataError(f"{where}, line {number}: {error}") from error
        if prompt.prompt_id in seen:
            raise DataError(
                f"{where}, line {number}: the id {prompt.prompt_id!r} is that of line {seen[prompt.prompt_id]} already."
            )
        seen[prompt.prompt_id] = number
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise DataError(f"{where} holds no prompts. Each line is one of {_FORMS}.")
    return prompts


def _read(path: str | None) -> bytes:
    if path is None:
        return DEFAULT_PROMPTS.read_bytes()
    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except FileNotFoundError as error:
        raise DataError(f"regenerate.prompts: there is no file {path}.") from error
    except Exception as error:  # whatever the protocol's filesystem raises
        raise DataError(f"regenerate.prompts: {path} cannot be read: {error}") from error


def _parse(value: Any, number: int) -> Prompt:
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a JSON object such as {_FORMS}")
    system = value.get("system")
    if "turns" in value:
        turns = value["turns"]
    elif "prompt" in value:
        turns = [value["prompt"]]
    elif "messages" in value:
        system, turns = _from_messages(value["messages"])
    else:
        raise ValueError(f"no `turns`, `prompt` or `messages`; a line is one of {_FORMS}")
    if not isinstance(turns, list) or not turns:
        raise ValueError("`turns` must be a list with at least one text")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"turn {index + 1} must be a text that is not empty, not {turn!r}")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"`system` must be a text, not {system!r}")
    prompt_id = value.get("id", f"prompt-{number:06d}")
    if not isinstance(prompt_id, str) or not prompt_id or not prompt_id.isprintable() or set(prompt_id) & set("/\\"):
        raise ValueError(f"`id` must be a printable text without slashes, not {prompt_id!r}")
    return Prompt(prompt_id, tuple(turns), system)


def _from_messages(messages: Any) -> tuple[str | None, list[Any]]:
    """System message and user turns; assistant messages are left out, because the verifier answers anew."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("`messages` must be a list of objects with `role` and `content`")
    unknown = {m["role"] for m in messages} - {"system", "user", "assistant"}
    if unknown:
        raise ValueError(f"`messages` has the role {sorted(map(str, unknown))[0]!r}; known: system, user, assistant")
    system = next((m.get("content") for m in messages if m["role"] == "system"), None)
    return system, [m.get("content") for m in messages if m["role"] == "user"]
