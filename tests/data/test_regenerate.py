"""Regeneration against a local server: what is kept, and what happens when something breaks in the middle."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from speculators.config import RetrainConfig
from speculators.data.regenerate import regenerate
from speculators.errors import DataError, ServingError, StoreError
from speculators.manifest import Manifest, Stage, StagePlan
from speculators.progress import Progress
from speculators.store import Store
from speculators.verifier import Verifier
from tests.data.fake_chat import EOS, VOCAB_SIZE, FakeChat, fake_chat, generate

PLAN = StagePlan(Stage.REGENERATE, {"test": "regenerate"})
VERIFIER = Verifier(Path("verifier"), "verifier", None, "0" * 16, {"vocab_size": VOCAB_SIZE}, [])


def write_prompts(folder: Path, count: int = 60) -> str:
    """Every fourth prompt has three turns, every second a system message."""
    lines = []
    for i in range(count):
        turns = [f"question {i} turn {turn}" for turn in range(3 if i % 4 == 0 else 1)]
        lines.append({"id": f"p{i}", "turns": turns, **({"system": "Be brief."} if i % 2 else {})})
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def make_config(prompts: str, **fields: Any) -> RetrainConfig:
    section = {"prompts": prompts, "concurrency": 4, "max_retries": 0, "max_tokens": 40, **fields}
    return RetrainConfig.model_validate({"regenerate": section})


def run(config: RetrainConfig, store: Store, server: FakeChat, progress: Progress | None = None) -> Manifest:
    return regenerate(config, PLAN, store, VERIFIER, [server.url], progress or Progress())


def conversations(store: Store) -> pd.DataFrame:
    return pd.read_parquet(io.BytesIO(store.read_bytes(PLAN.path("conversations.parquet"))))


def parts(store: Store) -> list[str]:
    return store.list(PLAN.path("parts"))


def saved_questions(store: Store) -> set[str]:
    """Last user message of every answer in the parts."""
    frames = [pd.read_parquet(io.BytesIO(store.read_bytes(path))) for path in parts(store)]
    return {json.loads(messages)[-1]["content"] for frame in frames for messages in frame["messages"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The result of a run in which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    store = Store(folder / "store")
    with fake_chat() as server:
        run(make_config(write_prompts(folder)), store, server)
    return store.read_bytes(PLAN.path("conversations.parquet"))


def test_answers_are_what_the_server_generated(tmp_path: Path, store: Store) -> None:
    class Recorder(Progress):
        seen: list[tuple[int, dict]]

        def start(self, description: str, total: int, unit: str) -> None:
            self.seen, self.total = [], total

        def update(self, done: int, total: int | None = None, **figures: Any) -> None:
            self.seen.append((done, figures))

    progress = Recorder()
    with fake_chat() as server:
        manifest = run(make_config(write_prompts(tmp_path, 8), max_tokens=20), store, server, progress)
        assert all(request["max_tokens"] == 20 and "seed" not in request for request in server.requests)
        assert len(server.requests) == 12

        assert run(make_config(write_prompts(tmp_path, 8)), store, server) == manifest, "finished: nothing is done"
        assert len(server.requests) == 12
    frame = conversations(store)
    assert list(frame["sample_id"]) == [f"p{i}/{t}" for i in range(8) for t in range(3 if i % 4 == 0 else 1)]
    for row in frame.itertuples():
        messages = json.loads(row.messages)
        tokens = generate(messages, None)
        assert list(row.token_ids) == tokens[:20]
        assert row.finish_reason == ("stop" if len(tokens) <= 20 else "length")
        assert row.token_ids.dtype == row.prompt_token_ids.dtype == "int32"
        assert messages[-1]["content"] == f"question {row.prompt_id[1:]} turn {row.turn}"
        assert (messages[0]["role"] == "system") == (int(row.prompt_id[1:]) % 2 == 1)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        earlier = frame[(frame["prompt_id"] == row.prompt_id) & (frame["turn"] < row.turn)]
        assert answers == list(earlier["text"]), "a later turn carries the regenerated answers"
    figures = manifest.figures
    assert figures["samples"] == 12
    assert figures["generated_tokens"] == frame["token_ids"].map(len).sum()
    assert figures["prompt_tokens"] == frame["prompt_token_ids"].map(len).sum()
    assert figures["truncated"] == (frame["finish_reason"] == "length").sum() > 0
    assert figures["empty"] == figures["skipped_too_long"] == 0
    assert figures["tokens_per_s"] > 0
    assert [done for done, _ in progress.seen] == list(range(1, 13))
    assert progress.total == 12
    assert progress.seen[-1][1]["tokens_per_s"] > 0
    assert not parts(store)


def test_sampling_is_reproducible(tmp_path: Path) -> None:
    results = []
    for seed, concurrency in ((0, 1), (0, 7), (1, 4)):
        store = Store(tmp_path / f"store-{seed}-{concurrency}")
        config = make_config(write_prompts(tmp_path), temperature=0.8, top_p=0.9, seed=seed, concurrency=concurrency)
        with fake_chat() as server:
            run(config, store, server)
            assert {(request["temperature"], request["top_p"]) for request in server.requests} == {(0.8, 0.9)}
            assert len({request["seed"] for request in server.requests}) == len(server.requests)
        results.append(store.read_bytes(PLAN.path("conversations.parquet")))
    assert results[0] == results[1] != results[2]


_RUN = """
import sys
from pathlib import Path
from tests.data.test_regenerate import *
prompts, store, url = sys.argv[1:]
regenerate(make_config(prompts), PLAN, Store(store), VERIFIER, [url], Progress())
"""


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_run_goes_on(tmp_path: Path, store: Store, undisturbed: bytes) -> None:
    prompts = write_prompts(tmp_path)
    with fake_chat() as server:
        server.hold_from = 40
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, prompts, store.url, server.url], cwd=Path(__file__).parents[2]
        )
        wait_until(lambda: len(server.requests) > 40 and len(parts(store)) > 0, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    saved = saved_questions(store)
    assert len(saved) >= 25
    assert PLAN.finished(store) is None

    with fake_chat() as server:
        manifest = run(make_config(prompts), store, server)
        asked = server.asked
    assert not saved & set(asked), "finished samples are not asked for again"
    assert len(asked) == len(set(asked)) == 90 - len(saved)
    assert store.read_bytes(PLAN.path("conversations.parquet")) == undisturbed
    assert manifest.figures["samples"] == 90
    assert manifest.figures["resumed_samples"] == len(saved)
    assert conversations(store)["sample_id"].is_unique
    assert not parts(store)


def interrupt(config: RetrainConfig, store: Store, after: int) -> None:
    """Run against a server that fails for good after some requests."""
    with fake_chat() as server:
        server.status = lambda number: 200 if number < after else 500
        with pytest.raises(ServingError, match="HTTP 500"):
            run(config, store, server)
    assert PLAN.finished(store) is None


def test_failing_endpoint_loses_nothing(tmp_path: Path, store: Store, undisturbed: bytes) -> None:
    config = make_config(write_prompts(tmp_path))
    interrupt(config, store, after=60)
    saved = saved_questions(store)
    # Requests that were under way when another one failed for good may be lost: one for each other worker.
    assert 57 <= len(saved) <= 60
    with fake_chat() as server:
        run(config, store, server)
        assert len(server.asked) == 90 - len(saved)
        assert not saved & set(server.asked)
    assert store.read_bytes(PLAN.path("conversations.parquet")) == undisturbed


def test_passing_failures_are_retried(tmp_path: Path, store: Store) -> None:
    with fake_chat() as server:
        server.status = lambda number: (200, 503, 429)[number] if number < 3 else 200
        run(make_config(write_prompts(tmp_path, 8), max_retries=3), store, server)
        assert len(server.requests) == 14
    assert len(conversations(store)) == 12


def test_refused_request_fails_at_once(tmp_path: Path, store: Store) -> None:
    with fake_chat() as server:
        server.status = lambda number: 400
        with pytest.raises(ServingError, match=r"HTTP 400: .*made to fail"):
            run(make_config(write_prompts(tmp_path), max_retries=5), store, server)
        assert len(server.requests) <= 4


@pytest.mark.parametrize("damage", ["garbage", "cut", "flipped", "empty"])
def test_damaged_part_is_done_again(
    damage: str, tmp_path: Path, store: Store, undisturbed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(write_prompts(tmp_path))
    interrupt(config, store, after=60)
    path = parts(store)[0]
    whole = store.read_bytes(path)
    frame = pd.read_parquet(io.BytesIO(whole))
    lost = {json.loads(messages)[-1]["content"] for messages in frame["messages"]}
    kept = saved_questions(store) - lost
    assert kept
    flipped = whole[:90] + bytes([whole[90] ^ 1]) + whole[91:]
    damaged = {"garbage": b"PAR1 no", "cut": whole[:-100], "flipped": flipped, "empty": b""}
    store.write_bytes(path, damaged[damage])

    with fake_chat() as server, caplog.at_level(logging.WARNING):
        run(config, store, server)
    assert f"{store.url_of(path)} is damaged" in caplog.text
    assert lost <= set(server.asked)
    # Besides, only turns whose earlier turn was lost.
    assert all("turn 0" not in question for question in kept & set(server.asked))
    assert store.read_bytes(PLAN.path("conversations.parquet")) == undisturbed


def test_turn_that_followed_another_answer_is_done_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts with first turns are lost, and the verifier words them differently now: later turns must follow that."""
    monkeypatch.setattr("speculators.data.regenerate._PART_SIZE", 1)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"{i} first", f"{i} second"]}) + "\n" for i in range(25)))
    config = make_config(str(path), concurrency=25)

    def answer_all_first_turns(vocab_offset: int, second_turns: int) -> None:
        """Then some second ones, and fail when all these are saved."""
        before = len(parts(store))
        allowed = iter([200] * second_turns)
        with fake_chat() as server:

            def status(number: int) -> int:
                if server.asked[number].endswith("first"):
                    return 200
                result = next(allowed, 500)
                expected = before + 25 + (second_turns if result == 500 else 0)
                while len(parts(store)) < expected and not server.release.wait(0.01):
                    pass
                return result

            server.vocab_offset, server.status = vocab_offset, status
            with pytest.raises(ServingError):
                run(config, store, server)

    answer_all_first_turns(vocab_offset=0, second_turns=15)
    for part in parts(store):
        if pd.read_parquet(io.BytesIO(store.read_bytes(part)))["turn"][0] == 0:
            store.delete(part)
    assert len(parts(store)) == 15
    answer_all_first_turns(vocab_offset=1, second_turns=0)
    with fake_chat() as server:
        server.vocab_offset = 1
        run(config, store, server)
        assert sorted(server.asked) == sorted(f"{i} second" for i in range(25))
    frame = conversations(store)
    assert len(frame) == 50
    texts = dict(zip(frame["sample_id"], frame["text"], strict=True))
    for row in frame[frame["turn"] == 1].itertuples():
        assert json.loads(row.messages)[1]["content"] == texts[f"{row.prompt_id}/0"]


@pytest.mark.parametrize("strict", [False, True], ids=["vLLM lowers max_tokens", "vLLM refuses"])
def test_prompts_that_do_not_fit(strict: bool, tmp_path: Path, store: Store) -> None:
    lines = [
        {"id": "fits", "turns": ["a b c"]},
        {"id": "little-room", "turns": ["word " * 95]},  # 97 tokens with role and start
        {"id": "full", "turns": ["word " * 98, "never asked"]},  # 100 tokens: no room at all
        {"id": "too-long", "turns": ["short", "word " * 300, "never asked", "nor this"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with fake_chat(max_model_len=100, strict=strict) as server:
        manifest = run(make_config(str(path)), store, server)
        assert not any("ask" in question or "nor" in question for question in server.asked)
    frame = conversations(store).set_index("sample_id")
    assert list(frame.index) == ["fits/0", "little-room/0", "full/0", "too-long/0", "too-long/1"]
    assert frame.loc["fits/0", "finish_reason"] == "stop"
    assert frame.loc["fits/0", "token_ids"][-1] == EOS
    assert len(frame.loc["little-room/0", "token_ids"]) == 3
    assert frame.loc["little-room/0", "finish_reason"] == "length"
    assert list(frame["finish_reason"])[2:] == ["too_long", "stop", "too_long"]
    assert len(frame.loc["too-long/1", "token_ids"]) == 0
    # full/0, full/1, too-long/1, /2, /3
    assert manifest.figures["skipped_too_long"] == 5
    assert manifest.figures["empty"] == 0


def test_another_model_behind_the_endpoint(tmp_path: Path, store: Store) -> None:
    with fake_chat() as server:
        server.vocab_offset = VOCAB_SIZE
        with pytest.raises(ServingError, match=r"token id \d+, but verifier has 1000 tokens.*serving\.endpoints"):
            run(make_config(write_prompts(tmp_path)), store, server)


def test_full_disk_is_one_clear_error(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, data: bytes) -> None:
        raise StoreError(f"Cannot write {path}: no space left.")

    with fake_chat() as server:
        monkeypatch.setattr(store, "write_bytes", full)
        with pytest.raises(StoreError, match="no space left"):
            run(make_config(write_prompts(tmp_path)), store, server)


def test_broken_prompts_file(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": }\n')
    with fake_chat() as server, pytest.raises(DataError, match=r"prompts\.jsonl, line 2: not valid JSON"):
        run(make_config(str(path)), store, server)
