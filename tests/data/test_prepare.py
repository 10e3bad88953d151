"""Preparation: samples, masks, splits and the draft vocabulary, from answers made by hand."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from speculators.config import RetrainConfig
from speculators.data.prepare import load_held_out, load_samples, load_vocab_mapping, prepare
from speculators.data.regenerate import CONVERSATIONS_FILE, Answer
from speculators.errors import DataError, MissingStageError, StoreError
from speculators.manifest import Manifest, Stage, StagePlan
from speculators.store import Store
from speculators.verifier import Verifier

VOCAB_SIZE, EOS = 300, 2
VERIFIER = Verifier(Path("v"), "v", None, "0" * 16, {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}, [])
REGENERATED = StagePlan(Stage.REGENERATE, {"test": "prepare"})
PLAN = StagePlan(Stage.PREPARE, {"test": "prepare"})
SPLITS = ("train", "validation", "held_out")


def answer(prompt_id: str, turn: int = 0, text: str | None = None, tokens: list[int] | None = None) -> Answer:
    """An answer whose first user turn is ``text``; prompt and tokens follow from a seed made of its id."""
    rng = np.random.default_rng([*f"{prompt_id}/{turn}".encode()])
    prompt = rng.integers(10, VOCAB_SIZE, 5 + turn * 20).tolist()
    generated = [int(t) for t in rng.zipf(1.5, rng.integers(6, 30)) % 200 + 10] + [EOS] if tokens is None else tokens
    content = f"question of {prompt_id}" if text is None else text
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "..."}] * turn
    messages.append({"role": "user", "content": "go on" if turn else content})
    stopped = bool(generated) and generated[-1] == EOS
    facts = (f"{prompt_id}/{turn}", prompt_id, turn, json.dumps(messages), prompt, generated, "text")
    return Answer(*facts, "stop" if stopped else "length")


def many(count: int = 40) -> list[Answer]:
    """Every fifth conversation has two turns."""
    return [answer(f"p{i}", turn) for i in range(count) for turn in range(2 if i % 5 == 0 else 1)]


def make_config(**fields: Any) -> RetrainConfig:
    section = {"held_out_prompts": 6, "validation_prompts": 4, "draft_vocab_size": 50, **fields}
    return RetrainConfig.model_validate({"prepare": section})


def run(store: Store, answers: list[Answer], **fields: Any) -> Manifest:
    buffer = io.BytesIO()
    pd.DataFrame([asdict(a) for a in answers]).to_parquet(buffer, index=False)
    store.write_bytes(REGENERATED.path(CONVERSATIONS_FILE), buffer.getvalue())
    REGENERATED.complete(store, {CONVERSATIONS_FILE: None}, {})
    return prepare(make_config(**fields), PLAN, REGENERATED, store, VERIFIER)


def split_of(store: Store) -> dict[str, str]:
    splits: dict[str, str] = {}
    for sample in load_samples(store, PLAN, SPLITS):
        assert splits.setdefault(sample.prompt_id, sample.split) == sample.split, "turns of one prompt in two splits"
    return splits


def test_samples_and_masks(store: Store) -> None:
    answers = {a.sample_id: a for a in many()}
    manifest = run(store, list(answers.values()))
    samples = load_samples(store, PLAN, SPLITS)
    assert [sample.sample_id for sample in samples] == list(answers)
    for sample in samples:
        made_from = answers[sample.sample_id]
        assert sample.token_ids.tolist() == made_from.prompt_token_ids + made_from.token_ids
        assert sample.token_ids.dtype == np.int32
        assert sample.loss_mask.dtype == np.bool_
        assert sample.prompt_length == len(made_from.prompt_token_ids)
        assert sample.token_ids[sample.loss_mask].tolist() == made_from.token_ids
    frame = pd.read_parquet(io.BytesIO(store.read_bytes(PLAN.path("samples.parquet"))))
    assert list(frame["n_tokens"]) == [len(s.token_ids) for s in samples]
    assert list(frame["n_loss_tokens"]) == [int(s.loss_mask.sum()) for s in samples]

    figures = manifest.figures
    assert [figures[f"{split}_prompts"] for split in SPLITS] == [30, 4, 6]
    assert sum(figures[f"{split}_samples"] for split in SPLITS) == len(samples) == 48
    assert sum(figures[f"{split}_tokens"] for split in SPLITS) == sum(len(s.token_ids) for s in samples)
    assert prepare(make_config(), PLAN, REGENERATED, store, VERIFIER) == manifest, "finished: nothing is done"


def test_cut_at_the_end_and_dropped_when_little_is_left(store: Store) -> None:
    answers = many()
    lengths = {"a": 3, "b": 4, "c": 60}
    answers += [answer(name, tokens=list(range(10, 10 + length))) for name, length in lengths.items()]
    manifest = run(store, answers, max_length=20, min_answer_tokens=4)
    samples = {s.sample_id: s for s in load_samples(store, PLAN, SPLITS)}
    # A second turn's prompt is 25 tokens long, so nothing of its answer is left.
    assert manifest.figures["dropped_short"] == 8 + 1
    assert not any(sample_id.endswith("/1") for sample_id in samples)
    assert "a/0" not in samples
    assert samples["b/0"].loss_mask.sum() == 4
    assert samples["c/0"].token_ids.tolist() == answers[-1].prompt_token_ids + list(range(10, 25))
    assert samples["c/0"].loss_mask.tolist() == [False] * 5 + [True] * 15


def test_held_out_prompts(store: Store) -> None:
    answers = {a.sample_id: a for a in many()}
    run(store, list(answers.values()))
    held_out = load_held_out(store, PLAN)
    assert len({prompt.prompt_id for prompt in held_out}) == 6
    for prompt in held_out:
        assert prompt.prompt_token_ids.tolist() == answers[prompt.sample_id].prompt_token_ids
        assert prompt.prompt_token_ids.dtype == np.int32
    trained = {s.prompt_id for s in load_samples(store, PLAN, ["train", "validation"])}
    assert not trained & {prompt.prompt_id for prompt in held_out}


def test_equal_prompts_share_a_split(store: Store) -> None:
    answers = many(30)
    for i in range(30):
        answers += [answer(f"copy{i}", text=f"question of p{i}"), answer(f"spaced{i}", text=f" question of p{i}\n")]
    run(store, answers)
    splits = split_of(store)
    assert all(splits[f"p{i}"] == splits[f"copy{i}"] == splits[f"spaced{i}"] for i in range(30))
    assert Counter(splits.values()) == {"train": 60, "validation": 12, "held_out": 18}


def test_split_is_stable(tmp_path: Path) -> None:
    def splits(name: str, answers: list[Answer], **fields: Any) -> dict[str, str]:
        store = Store(tmp_path / name)
        run(store, answers, **fields)
        return split_of(store)

    before = splits("before", many())
    assert splits("reversed", many()[::-1]) == before
    renamed = [answer(f"other-{a.prompt_id}", a.turn, f"question of {a.prompt_id}") for a in many()]
    assert splits("renamed", renamed) == {f"other-{name}": split for name, split in before.items()}
    assert splits("seed", many(), split_seed=1) != before

    added = splits("added", [answer(f"new{i}") for i in range(10)] + many())
    rank = {"held_out": 0, "validation": 1, "train": 2}
    assert all(rank[added[name]] >= rank[split] for name, split in before.items()), "nothing trained on is held out now"
    assert sum(added[name] != split for name, split in before.items()) <= 10
    assert Counter(added.values()) == {"train": 40, "validation": 4, "held_out": 6}


def test_vocabulary_and_counts(store: Store) -> None:
    answers = many()
    manifest = run(store, answers)
    counts: Counter[int] = Counter()
    for sample in load_samples(store, PLAN, ["train"]):
        counts.update(sample.token_ids[sample.prompt_length :].tolist())
    table = pd.read_parquet(io.BytesIO(store.read_bytes(PLAN.path("token_counts.parquet"))))
    assert dict(zip(table["token_id"], table["count"], strict=True)) == counts
    assert table["token_id"].is_monotonic_increasing

    mapping = load_vocab_mapping(store, PLAN)
    assert mapping is not None
    ranked = sorted(range(VOCAB_SIZE), key=lambda token: (token != EOS, -counts[token], token))
    assert mapping.kept_ids.tolist() == sorted(ranked[:50])
    kept = set(ranked[:50])
    for split in SPLITS:
        tokens = [t for s in load_samples(store, PLAN, [split]) for t in s.token_ids[s.loss_mask].tolist()]
        assert manifest.figures[f"{split}_coverage"] == pytest.approx(sum(t in kept for t in tokens) / len(tokens))
    assert manifest.figures["draft_vocab_size"] == 50
    assert manifest.figures["distinct_tokens"] == len(counts)


def test_stop_tokens_are_always_kept(store: Store) -> None:
    """The configured end of sequence, though it never occurs, and the one that answers really end with."""
    common = [token for token in range(10, 40) for _ in range(5)]
    answers = [answer(f"p{i}", tokens=[*common, 290]) for i in range(20)]
    answers = [Answer(**{**asdict(a), "finish_reason": "stop"}) for a in answers]
    run(store, answers, draft_vocab_size=10)
    mapping = load_vocab_mapping(store, PLAN)
    assert mapping is not None
    assert mapping.kept_ids.tolist() == [EOS, *range(10, 18), 290]


@pytest.mark.parametrize("size", [None, VOCAB_SIZE])  # by default 8192, and no more than there are
def test_whole_vocabulary_needs_no_mapping(size: int | None, store: Store) -> None:
    manifest = run(store, many(), draft_vocab_size=size)
    assert load_vocab_mapping(store, PLAN) is None
    assert "vocab_mapping.safetensors" not in manifest.outputs
    assert manifest.figures["draft_vocab_size"] == VOCAB_SIZE
    assert manifest.figures["held_out_coverage"] == 1.0


def test_what_cannot_be_prepared(store: Store) -> None:
    with pytest.raises(MissingStageError, match="speculators regenerate-responses"):
        prepare(make_config(), PLAN, REGENERATED, store, VERIFIER)
    with pytest.raises(DataError, match=r"draft_vocab_size \(301\) exceeds the verifier's vocabulary \(300\)"):
        run(store, many(), draft_vocab_size=301)
    with pytest.raises(DataError, match=r"There are 10 different prompts, but .*\(6\).*\(4\) take 10"):
        run(store, many(10))
    with pytest.raises(DataError, match=r"No usable train sample is left: 48 of 48 .*max_length \(8\)"):
        run(store, many(), max_length=8, min_answer_tokens=4)
    with pytest.raises(MissingStageError, match="speculators prepare-data"):
        load_samples(store, PLAN, SPLITS)


@pytest.mark.parametrize("damage", ["changed", "cut"])
@pytest.mark.parametrize("name", ["samples.parquet", "vocab_mapping.safetensors"])
def test_changed_files_are_refused(name: str, damage: str, store: Store) -> None:
    run(store, many())
    path = PLAN.path(name)
    data = store.read_bytes(path)
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    store.write_bytes(path, changed if damage == "changed" else data[:-8])
    with pytest.raises(StoreError, match=f"{name} is not the file that its manifest describes"):
        load_held_out(store, PLAN) if name == "samples.parquet" else load_vocab_mapping(store, PLAN)


def test_changed_conversations_are_refused(store: Store) -> None:
    run(store, many())
    store.delete(PLAN.directory)
    store.write_bytes(REGENERATED.path(CONVERSATIONS_FILE), b"PAR1")
    with pytest.raises(StoreError, match=r"conversations\.parquet is not the file"):
        prepare(make_config(), PLAN, REGENERATED, store, VERIFIER)


def test_same_bytes_every_time(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name) for name in ("one", "two")]
    digests = [{name: output["sha256"] for name, output in run(store, many()).outputs.items()} for store in stores]
    assert digests[0] == digests[1]
    assert set(digests[0]) == {"samples.parquet", "token_counts.parquet", "vocab_mapping.safetensors"}
