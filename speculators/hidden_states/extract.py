"""Extraction: a set of hidden states is made whole, with whatever is missing computed by vLLM."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import time
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from speculators.config import RetrainConfig
from speculators.data.prepare import Sample, load_samples
from speculators.errors import ServingError, StoreError
from speculators.hidden_states.capture import Capture
from speculators.hidden_states.format import (
    INDEX_FILE,
    SHARDS,
    IndexEntry,
    SampleEntry,
    Sidecar,
    StateFormat,
    token_checksum,
)
from speculators.hidden_states.reader import HiddenStateReader
from speculators.hidden_states.transformers_extractor import compute_states
from speculators.manifest import Manifest, StagePlan
from speculators.progress import Progress
from speculators.serving.client import VllmClient
from speculators.serving.vllm_server import VllmServer
from speculators.store import TEMPORARY_MARK, Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
_STALLED_S = 180.0
_SPACE_MARGIN = 1.05
_ABANDONED_S = 60.0


def extract(
    config: RetrainConfig,
    plan: StagePlan,
    prepare_plan: StagePlan,
    store: Store,
    verifier: Verifier,
    progress: Progress,
) -> Manifest:
    """Hidden states of all training and validation samples.

    Samples that are in the store already are not computed again: regeneration has left them there, or an earlier run
    that was interrupted. For the others it starts vLLM, sends each as a prompt, and waits until all are in the store;
    or transformers computes them (``extract.backend``).

    Raises:
        MissingStageError: Preparation has not finished.
        StoreError: There is too little space, or the store cannot be written.
        ServingError: vLLM did not start, or died.
        CheckpointError: transformers cannot run the verifier.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    capture = Capture(config, plan, store, verifier)
    capture.forget_errors()
    _remove_abandoned(store, plan)
    samples = load_samples(store, prepare_plan, ["train", "validation"])
    states = _States(capture, plan, samples)
    states.refresh()
    missing = states.missing()
    seconds = 0.0
    if missing:
        if len(missing) < len(samples):
            logger.info("%d of %d samples are there already.", len(samples) - len(missing), len(samples))
        _check_space(plan, store, verifier, missing)
        if config.extract.backend == "transformers":
            started = time.monotonic()
            needed_from = functools.partial(last_from, states.format)
            compute_states(verifier, config, plan, store, missing, needed_from, progress)
            states.refresh()
            seconds = time.monotonic() - started
        else:
            with capture.server("vllm-extract") as server:
                started = time.monotonic()
                asyncio.run(_send_all(config, capture, server, missing, states, progress))
                seconds = time.monotonic() - started
    return _finish(plan, store, states, verifier, sum(len(sample.token_ids) - 1 for sample in missing), seconds)


def finish_set(
    config: RetrainConfig, plan: StagePlan, store: Store, verifier: Verifier, samples: list[Sample]
) -> list[Sample]:
    """Make a set of whatever shards there are; nothing happens when it is whole already.

    Returns:
        Samples that are missing; if there are any, nothing was made.
    """
    if plan.finished(store) is not None:
        return []
    states = _States(Capture(config, plan, store, verifier), plan, samples)
    states.refresh()
    if missing := states.missing():
        return missing
    _finish(plan, store, states, verifier, sum(len(sample.token_ids) - 1 for sample in samples), 0.0)
    return []


def read_shards(
    config: RetrainConfig, plan: StagePlan, store: Store, verifier: Verifier, samples: list[Sample]
) -> HiddenStateReader:
    """A reader of those of the samples that are in the shards of an unfinished set."""
    states = _States(Capture(config, plan, store, verifier), plan, samples)
    states.refresh()
    return HiddenStateReader(store, plan.directory, states.format, verifier.hidden_size, states.entries())


async def _send_all(
    config: RetrainConfig,
    capture: Capture,
    server: VllmServer,
    samples: list[Sample],
    states: _States,
    progress: Progress,
) -> None:
    section = config.regenerate
    wanted = sum(len(sample.token_ids) - 1 for sample in samples)
    progress.start("extract", wanted, "tokens")
    before, started = states.tokens, time.monotonic()

    async def watch(sending: asyncio.Task[None]) -> None:
        """Until every sample is in the store; a server that died or stalls is an error."""
        last_tokens, last_change = states.tokens, time.monotonic()
        while states.missing():
            await asyncio.sleep(0.5)
            server.check_alive()
            await asyncio.to_thread(states.refresh)
            now = time.monotonic()
            if states.tokens != last_tokens or not sending.done():
                last_tokens, last_change = states.tokens, now
            if now - last_change > _STALLED_S:
                raise ServingError(
                    f"vLLM answered everything, but {len(states.missing())} samples did not reach the store within"
                    f" {_STALLED_S:.0f} s. See {server.log_file}."
                )
            extracted = states.tokens - before
            progress.update(extracted, tokens_per_s=round(extracted / (now - started), 1))

    async def send(client: VllmClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                await client_slots.acquire()
                tasks.create_task(send_one(client, sample))

    async def send_one(client: VllmClient, sample: Sample) -> None:
        try:
            await client.complete(
                sample.token_ids[:-1].tolist(),
                max_tokens=1,
                temperature=0.0,
                kv_transfer_params=capture.request(sample.sample_id, last_from(states.format, sample)),
            )
        finally:
            client_slots.release()

    concurrency = config.extract.concurrency
    client_slots = asyncio.Semaphore(concurrency)
    async with VllmClient([server.url], concurrency, section.request_timeout_s, section.max_retries) as client:
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(send(client))
                tasks.create_task(watch(sending))
        except* (ServingError, StoreError) as group:
            raise capture.cause(server, _first(group)) from None
        finally:
            progress.finish()


def _first(group: Exception) -> Exception:
    while isinstance(group, ExceptionGroup):
        group = group.exceptions[0]
    return group


def last_from(states: StateFormat, sample: Sample) -> int:
    """First row of a sample whose last layer is needed: the one that predicts the first token with a loss."""
    return 0 if states.needs_last_everywhere else max(int(sample.loss_mask.argmax()) - 1, 0)


class _States:
    """Which samples are in the store already, as the sidecars say."""

    def __init__(self, capture: Capture, plan: StagePlan, samples: list[Sample]) -> None:
        self._capture, self.format = capture, StateFormat.from_json(plan.determinants["states"])
        self._wanted = {sample.sample_id: sample for sample in samples}
        self._found: dict[str, tuple[str, SampleEntry]] = {}
        self.tokens = 0

    def refresh(self) -> None:
        """Read sidecars that are new; of a sample saved twice the first counts.

        Raises:
            StoreError: A writer gave up; says why.
        """
        for sidecar in self._capture.refresh():
            for entry in sidecar.samples:
                self._note(sidecar.shard, entry)

    def _note(self, shard: str, entry: SampleEntry) -> None:
        sample = self._wanted.get(entry.sample_id)
        if sample is None or entry.sample_id in self._found:
            return
        # There may be more of the last layer than is needed, but not less.
        fits = entry.rows == len(sample.token_ids) - 1 and entry.last_from <= last_from(self.format, sample)
        if fits and entry.token_crc32 == token_checksum(sample.token_ids[:-1]):
            self._found[entry.sample_id] = shard, entry
            self.tokens += entry.rows

    def missing(self) -> list[Sample]:
        """Samples that are not in the store."""
        return [sample for sample_id, sample in self._wanted.items() if sample_id not in self._found]

    def entries(self) -> list[IndexEntry]:
        """What was found, in the dataset's order."""
        found = [self._found[sample_id] for sample_id in self._wanted if sample_id in self._found]
        return [IndexEntry(shard=shard, **asdict(entry)) for shard, entry in found]

    def used(self) -> list[Sidecar]:
        """Sidecars of the shards that the index names."""
        shards = {shard for shard, _ in self._found.values()}
        return [sidecar for sidecar in self._capture.sidecars.values() if sidecar.shard in shards]


def _remove_abandoned(store: Store, plan: StagePlan) -> None:
    """Half-written files of killed writers: nobody counts them, but they fill the disk."""
    if store.is_local:
        for file in Path(store.full_path(plan.path(SHARDS))).glob(f".*{TEMPORARY_MARK}*"):
            if time.time() - file.stat().st_mtime > _ABANDONED_S:  # a younger one may be another run's
                file.unlink(missing_ok=True)


def _finish(
    plan: StagePlan, store: Store, states: _States, verifier: Verifier, computed: int, seconds: float
) -> Manifest:
    index, kept = pd.DataFrame(map(asdict, states.entries())), states.used()
    names = {
        f"{sidecar.shard.removesuffix('.safetensors')}{end}" for sidecar in kept for end in (".safetensors", ".json")
    }
    for path in store.list(plan.path(SHARDS)):
        if path.removeprefix(f"{plan.directory}/") not in names:
            store.delete(path)  # left by a writer that was killed
    _remove_abandoned(store, plan)
    store.abort_uploads(plan.path(SHARDS))
    buffer = io.BytesIO()
    index.to_parquet(buffer, index=False)
    store.write_bytes(plan.path(INDEX_FILE), buffer.getvalue())
    total = sum(sidecar.bytes for sidecar in kept)
    files: dict[str, str | None] = {INDEX_FILE: None}
    files.update({sidecar.shard: sidecar.sha256 for sidecar in kept})
    rows = int(index["rows"].sum())
    return plan.complete(
        store,
        files,
        {
            "samples": len(index),
            "tokens": rows,
            "bytes": total,
            "bytes_per_sample": round(total / len(index)),
            "bytes_per_token": round(total / rows, 1),
            "computed_tokens": computed,
            "tokens_per_s": round(computed / seconds, 1) if seconds else None,
            "shards": len(kept),
            "hidden_size": verifier.hidden_size,
        },
    )


def _check_space(plan: StagePlan, store: Store, verifier: Verifier, samples: list[Sample]) -> None:
    """Hidden states are large: say so before the disk is full."""
    states = StateFormat.from_json(plan.determinants["states"])
    aux, last = states.row_bytes(verifier.hidden_size)
    needed = 0
    for sample in samples:
        rows = len(sample.token_ids) - 1
        needed += rows * aux + (rows - last_from(states, sample)) * last
    needed, free = int(_SPACE_MARGIN * needed), store.free_bytes()
    if free is not None and needed > free:
        raise StoreError(
            f"The hidden states need about {needed / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB are free in"
            f" {store.url}. Free some space, set `store` to a place with more (s3:// works), choose"
            " extract.dtype: float8_e4m3, or lower regenerate.max_prompts."
        )
