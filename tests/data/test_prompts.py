"""Prompts: the forms that are read, and every way in which a line can be wrong."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import fsspec
import pytest

from speculators.data.prompts import Prompt, load_prompts, prompts_digest
from speculators.errors import DataError

GOOD = '{"prompt": "Hello"}'


def write(folder: Path, *lines: str | bytes) -> str:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def test_all_forms(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "An answer that is made anew."},
        {"role": "user", "content": "Two?"},
    ]
    path = write(
        tmp_path,
        '{"id": "a", "category": "math", "system": "You count.", "turns": ["1?", "2?"]}',
        "",
        GOOD,
        json.dumps({"messages": messages}),
        '{"id": null, "prompt": "No id"}\r',
    )
    assert load_prompts(path) == [
        Prompt("a", ("1?", "2?"), "You count."),
        Prompt("prompt-000003", ("Hello",)),
        Prompt("prompt-000004", ("One?", "Two?"), "Be brief."),
        Prompt("prompt-000005", ("No id",)),
    ]
    assert len(load_prompts(path, limit=2)) == 2


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    path = write(tmp_path, codecs.BOM_UTF8 + json.dumps({"prompt": text}, ensure_ascii=False).encode(), GOOD)
    assert [prompt.turns for prompt in load_prompts(path)] == [(text,), ("Hello",)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8 \\(byte 13"),
        ("[" * 100_000, "nested too deeply"),
        ('["x"]', "must be a JSON object"),
        ('{"turn": ["x"]}', "no `turns`, `prompt` or `messages`"),
        ('{"turns": ["x"], "prompt": "y"}', "only one of"),
        ('{"turns": []}', "at least one"),
        ('{"turns": "x"}', "in a list"),
        ('{"turns": ["x", "  "]}', "turn 2 must be a text that is not empty"),
        ('{"turns": ["x", 5]}', "turn 2 must be a text"),
        ('{"prompt": null}', "turn 1 must be a text"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "x", "system": 1}', "`system` must be a text"),
        ('{"prompt": "x", "id": "a/b"}', "`id` must be"),
        ('{"prompt": "x", "id": "a\\nb"}', "`id` must be"),
        ('{"prompt": "x", "id": ""}', "`id` must be"),
        ('{"prompt": "x", "id": 7}', "`id` must be"),
        ('{"prompt": "x", "id": "first"}', "is that of line 1"),
        ('{"messages": "x"}', "`messages` must be a list"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "at least one user turn"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role 'tool'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "turn 1 must be a text"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}', "one system message"),
        ('{"system": "z", "messages": [{"role": "system", "content": "y"}]}', "given twice"),
    ],
)
def test_broken_line(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write(tmp_path, '{"prompt": "x", "id": "first"}', line)
    with pytest.raises(DataError, match=reason) as caught:
        load_prompts(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*nowhere\.jsonl"):
        load_prompts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="nowhere"):
        prompts_digest(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="holds no prompts"):
        load_prompts(write(tmp_path, "", " "))
    with pytest.raises(DataError, match="cannot be read"):
        load_prompts(str(tmp_path))


def test_urls(tmp_path: Path) -> None:
    with fsspec.open("memory://prompts/p.jsonl", "wb") as file:
        file.write(GOOD.encode())
    assert load_prompts("memory://prompts/p.jsonl")[0].turns == ("Hello",)
    with pytest.raises(DataError, match="credentials") as caught:
        load_prompts("s3://key:hidden@bucket/p.jsonl")
    assert "hidden" not in str(caught.value)
    with pytest.raises(DataError, match="cannot be read"):
        load_prompts("nosuch://bucket/p.jsonl")


def test_digest_follows_content(tmp_path: Path) -> None:
    before = prompts_digest(write(tmp_path, GOOD))
    assert before == prompts_digest(write(tmp_path, GOOD))
    assert before != prompts_digest(write(tmp_path, GOOD, GOOD))


def test_prompts_that_come_with_the_project() -> None:
    prompts = load_prompts(None)
    assert len(prompts) >= 300
    assert sum(len(prompt.turns) > 1 for prompt in prompts) >= 20
    assert len({prompt.turns[0].strip().lower() for prompt in prompts}) == len(prompts)
