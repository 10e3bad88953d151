"""Prompts: read from JSON Lines, checked line by line."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from speculators.errors import DataError

DEFAULT_PROMPTS = Path(__file__).with_name("default_prompts.jsonl")
_FORMS = (
    '{"turns": ["first question", "follow-up", ...]}, {"prompt": "..."} or'
    ' {"messages": [{"role": ..., "content": ...}]}'
)
_SAFE_ID = re.compile(r"[^/\\]{1,200}")


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
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    # Only the line feed ends a line: a JSON text may hold U+2028 and others that str.splitlines() would cut at.
    for number, line in enumerate(_read(path).removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _parse(_decode(line), number)
        except ValueError as error:
            raise DataError(f"{where}, line {number}: {error}.") from error
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
    if "@" in path.partition("://")[2].split("/")[0]:
        raise DataError("regenerate.prompts: the URL carries credentials. Put them into the environment.")
    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except FileNotFoundError as error:
        raise DataError(f"regenerate.prompts: there is no file {path}.") from error
    except Exception as error:  # whatever the protocol's filesystem raises
        raise DataError(f"regenerate.prompts: {path} cannot be read: {error}") from error


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _parse(value: Any, number: int) -> Prompt:
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a JSON object such as {_FORMS}")
    if len(value.keys() & {"turns", "prompt", "messages"}) > 1:
        raise ValueError("only one of `turns`, `prompt` and `messages` can be given")
    system = value.get("system")
    if "turns" in value:
        turns = value["turns"]
    elif "prompt" in value:
        turns = [value["prompt"]]
    elif "messages" in value:
        stated, turns = _from_messages(value["messages"])
        if stated is not None and system is not None:
            raise ValueError("`system` is given twice, also as a message")
        system = system if stated is None else stated
    else:
        raise ValueError(f"no `turns`, `prompt` or `messages`; a line is one of {_FORMS}")
    if not isinstance(turns, list) or not turns:
        raise ValueError("there must be at least one user turn, in a list")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"turn {index + 1} must be a text that is not empty, not {_short(turn)}")
        _check_encodable(turn, f"turn {index + 1}")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"`system` must be a text, not {_short(system)}")
    _check_encodable(system or "", "`system`")
    prompt_id = value.get("id")
    if prompt_id is None:
        prompt_id = f"prompt-{number:06d}"
    if not isinstance(prompt_id, str) or not _SAFE_ID.fullmatch(prompt_id) or not prompt_id.isprintable():
        raise ValueError(
            f"`id` must be a printable text of at most 200 characters without slashes, not {_short(prompt_id)}"
        )
    return Prompt(prompt_id, tuple(turns), system)


def _from_messages(messages: Any) -> tuple[str | None, list[Any]]:
    """System message and user turns; assistant messages are left out, because the verifier answers anew."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("`messages` must be a list of objects with `role` and `content`")
    unknown = {m["role"] for m in messages} - {"system", "user", "assistant"}
    if unknown:
        raise ValueError(f"`messages` has the role {sorted(map(str, unknown))[0]!r}; known: system, user, assistant")
    systems = [m.get("content") for m in messages if m["role"] == "system"]
    if len(systems) > 1 or (systems and messages[0]["role"] != "system"):
        raise ValueError("`messages` can have one system message, as the first")
    return next(iter(systems), None), [m.get("content") for m in messages if m["role"] == "user"]


def _check_encodable(text: str, what: str) -> None:
    r"""Refuse what JSON can write as ``\ud800`` but no request can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half of a surrogate pair at character {error.start + 1}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
