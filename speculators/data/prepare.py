"""Preparation: training samples, splits by prompt, and the draft vocabulary, from the regenerated answers."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from speculators.config import RetrainConfig
from speculators.data.regenerate import CONVERSATIONS_FILE
from speculators.data.splits import SPLITS, split_prompts
from speculators.data.vocabulary import VocabMapping, build_vocab_mapping
from speculators.errors import DataError, StoreError
from speculators.manifest import Manifest, StagePlan
from speculators.store import Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
DEFAULT_DRAFT_VOCAB_SIZE = 8192
SAMPLES_FILE, COUNTS_FILE, MAPPING_FILE = "samples.parquet", "token_counts.parquet", "vocab_mapping.safetensors"
HOW_TO_PREPARE = "speculators prepare-data"


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: a prompt and the verifier's answer.

    Attributes:
        split: ``train``, ``validation`` or ``held_out``.
        token_ids: int32 [n].
        loss_mask: bool [n], True on the tokens that the verifier generated.
        prompt_length: Tokens before the first generated one.
    """

    sample_id: str
    prompt_id: str
    split: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_length: int


@dataclass(frozen=True)
class EvaluationPrompt:
    """A held-out prompt as token ids, chat template applied: int32 [n]."""

    sample_id: str
    prompt_id: str
    prompt_token_ids: np.ndarray


def prepare(
    config: RetrainConfig, plan: StagePlan, regenerate_plan: StagePlan, store: Store, verifier: Verifier
) -> Manifest:
    """Make samples, token counts and the vocabulary mapping.

    Prompts are split as :func:`~speculators.data.splits.split_prompts` says. Every turn of a prompt is a sample of its
    own: its prompt holds the earlier turns as the served chat template renders them, and only its own answer is trained
    on.

    Raises:
        MissingStageError: Regeneration has not finished.
        DataError: There are too few prompts for the splits, a split has no usable answers, or the draft vocabulary is
            larger than the verifier's.
        StoreError: The regenerated answers are not the ones that their manifest describes.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    regenerate_plan.require(store, "speculators regenerate-responses")
    answers = pd.read_parquet(io.BytesIO(_verified(store, regenerate_plan, CONVERSATIONS_FILE)))
    splits = split_prompts(_first_turns(answers), config)
    rows, dropped = _samples(answers, splits, config)
    frame = pd.DataFrame(rows)
    for split in SPLITS:
        if frame.empty or not (frame["split"] == split).any():
            raise DataError(
                f"No usable {split} sample is left: {dropped} of {len(answers)} answers have fewer than"
                f" prepare.min_answer_tokens ({config.prepare.min_answer_tokens}) tokens once they are cut to"
                f" prepare.max_length ({config.prepare.max_length}). Change these, or use more prompts."
            )

    counts = _count(frame[frame["split"] == "train"], verifier.vocab_size)
    files: dict[str, str | None] = {SAMPLES_FILE: None, COUNTS_FILE: None}
    _write_parquet(store, plan.path(SAMPLES_FILE), frame)
    used = np.flatnonzero(counts)
    _write_parquet(store, plan.path(COUNTS_FILE), pd.DataFrame({"token_id": used, "count": counts[used]}))
    mapping = None
    size = config.prepare.draft_vocab_size or min(DEFAULT_DRAFT_VOCAB_SIZE, verifier.vocab_size)
    # Equal vocabularies need no mapping: vLLM then takes draft ids for verifier ids.
    if size != verifier.vocab_size:
        mapping = build_vocab_mapping(counts, size, _stop_tokens(answers, verifier))
        store.write_bytes(plan.path(MAPPING_FILE), mapping.to_bytes())
        files[MAPPING_FILE] = None
    figures: dict[str, Any] = {
        "dropped_short": dropped,
        "draft_vocab_size": size if mapping is not None else verifier.vocab_size,
        "distinct_tokens": len(used),
    }
    for split in SPLITS:
        part = frame[frame["split"] == split]
        figures[f"{split}_prompts"] = int(part["prompt_id"].nunique())
        figures[f"{split}_samples"] = len(part)
        figures[f"{split}_tokens"] = int(part["n_tokens"].sum())
        figures[f"{split}_loss_tokens"] = int(part["n_loss_tokens"].sum())
        figures[f"{split}_coverage"] = _coverage(_count(part, verifier.vocab_size), mapping)
    return plan.complete(store, files, figures)


def load_samples(store: Store, plan: StagePlan, splits: Sequence[str]) -> list[Sample]:
    """Samples of some splits, in the dataset's order.

    Raises:
        MissingStageError: Preparation has not finished.
        StoreError: The file is not the one that the manifest describes.
    """
    frame = pd.read_parquet(io.BytesIO(_verified(store, plan, SAMPLES_FILE)))
    return [
        Sample(
            row.sample_id,
            row.prompt_id,
            row.split,
            np.asarray(row.token_ids, dtype=np.int32),
            np.asarray(row.loss_mask, dtype=np.bool_),
            int(row.prompt_length),
        )
        for row in _rows(frame[frame["split"].isin(list(splits))])
    ]


def load_held_out(store: Store, plan: StagePlan) -> list[EvaluationPrompt]:
    """Prompts that were kept from training, for evaluation; raises as :func:`load_samples`."""
    return [
        EvaluationPrompt(sample.sample_id, sample.prompt_id, sample.token_ids[: sample.prompt_length])
        for sample in load_samples(store, plan, ["held_out"])
    ]


def load_vocab_mapping(store: Store, plan: StagePlan) -> VocabMapping | None:
    """The draft vocabulary of a dataset; None when it is the verifier's. Raises as :func:`load_samples`."""
    manifest = plan.require(store, HOW_TO_PREPARE)
    if MAPPING_FILE not in manifest.outputs:
        return None
    return VocabMapping.from_bytes(_verified(store, plan, MAPPING_FILE))


def _verified(store: Store, plan: StagePlan, name: str) -> bytes:
    """A file of a finished stage, checked against its manifest."""
    manifest = plan.require(store, HOW_TO_PREPARE)
    data = store.read_bytes(plan.path(name))
    if hashlib.sha256(data).hexdigest() != manifest.outputs.get(name, {}).get("sha256"):
        raise StoreError(
            f"{store.url_of(plan.path(name))} is not the file that its manifest describes. Delete"
            f" {store.url_of(plan.directory)} to have it made anew."
        )
    return data


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Rows as named tuples, whose fields pandas' types know too little about."""
    return iter(frame.itertuples(index=False))


def _first_turns(answers: pd.DataFrame) -> dict[str, str]:
    first = answers[answers["turn"] == 0]
    return {row.prompt_id: json.loads(row.messages)[-1]["content"] for row in _rows(first)}


def _samples(answers: pd.DataFrame, splits: dict[str, str], config: RetrainConfig) -> tuple[list[dict[str, Any]], int]:
    rows, dropped = [], 0
    for row in _rows(answers):
        prompt, generated = list(row.prompt_token_ids), list(row.token_ids)
        token_ids = (prompt + generated)[: config.prepare.max_length]
        n_loss = len(token_ids) - len(prompt)
        if n_loss < config.prepare.min_answer_tokens:
            dropped += 1
            continue
        rows.append(
            {
                "sample_id": row.sample_id,
                "prompt_id": row.prompt_id,
                "split": splits[row.prompt_id],
                "token_ids": np.asarray(token_ids, dtype=np.int32),
                "loss_mask": np.arange(len(token_ids)) >= len(prompt),
                "prompt_length": len(prompt),
                "n_tokens": len(token_ids),
                "n_loss_tokens": n_loss,
            }
        )
    return rows, dropped


def _count(frame: pd.DataFrame, vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token occurs where the loss counts."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in _rows(frame):
        counts += np.bincount(np.asarray(row.token_ids)[np.asarray(row.loss_mask)], minlength=vocab_size)
    return counts


def _coverage(counts: np.ndarray, mapping: VocabMapping | None) -> float:
    """Share of the tokens that the drafter can propose at all."""
    if mapping is None or not counts.sum():
        return 1.0
    return float(counts[mapping.kept_ids.numpy()].sum() / counts.sum())


def _stop_tokens(answers: pd.DataFrame, verifier: Verifier) -> list[int]:
    """The verifier's end-of-sequence ids, and whatever ended an answer."""
    configured = verifier.config.get("eos_token_id")
    found = set(configured if isinstance(configured, list) else [configured]) - {None}
    stopped = answers[(answers["finish_reason"] == "stop") & (answers["token_ids"].map(len) > 0)]
    counts = Counter(int(row.token_ids[-1]) for row in _rows(stopped))
    # A stop string can end an answer on any token; an end-of-sequence token ends many.
    found |= {token for token, count in counts.items() if count > 0.05 * len(stopped)}
    return sorted(int(token) for token in found)


def _write_parquet(store: Store, path: str, frame: pd.DataFrame) -> None:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    store.write_bytes(path, buffer.getvalue())
