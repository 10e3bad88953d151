"""Extraction: vLLM computes the verifier's hidden states and writes them to the store through our connector."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from pathlib import Path

import pandas as pd

from speculators.config import RetrainConfig
from speculators.data.prepare import Sample, load_samples
from speculators.errors import ServingError, StoreError
from speculators.hidden_states.format import (
    DTYPES,
    ERRORS,
    INDEX_FILE,
    SHARDS,
    SampleEntry,
    Sidecar,
    cached_layers,
    token_checksum,
)
from speculators.hidden_states.vllm_plugin import MIMO_WITH_HIDDEN_STATES
from speculators.manifest import Manifest, StagePlan
from speculators.progress import Progress
from speculators.serving.client import VllmClient
from speculators.serving.vllm_server import VllmServer
from speculators.store import TEMPORARY_MARK, Store
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)
_STALLED_S = 180.0
_SPACE_MARGIN = 1.05
_IDLE_FLUSH_S = 2.0
_ABANDONED_S = 60.0


def extract(
    config: RetrainConfig,
    plan: StagePlan,
    prepare_plan: StagePlan,
    store: Store,
    verifier: Verifier,
    layer_ids: list[int],
    progress: Progress,
) -> Manifest:
    """Hidden states of all training and validation samples.

    Starts vLLM, sends every sample as a prompt, and waits until all are in the store. Samples in shards of an earlier,
    interrupted run are not computed again.

    Args:
        layer_ids: Layers to save: auxiliary ones, then the last one (before the final norm).

    Raises:
        MissingStageError: Preparation has not finished.
        StoreError: There is too little space, or the store cannot be written.
        ServingError: vLLM did not start, or died.
    """
    if (done := plan.finished(store)) is not None:
        return done
    plan.begin()
    store.delete(plan.path(ERRORS))  # what stopped an earlier run
    _remove_abandoned(store, plan)
    samples = load_samples(store, prepare_plan, ["train", "validation"])
    shards = _Shards(store, plan, samples)
    shards.refresh()
    missing = shards.missing()
    seconds = 0.0
    if missing:
        if len(missing) < len(samples):
            logger.info("Going on: %d of %d samples are there already.", len(samples) - len(missing), len(samples))
        _check_space(config, store, verifier, missing, layer_ids)
        with VllmServer(
            config.serving,
            verifier.path,
            Path(config.work_dir),
            name="vllm-extract",
            extra_args=_server_arguments(config, plan, store, verifier, layer_ids),
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        ) as server:
            started = time.monotonic()
            asyncio.run(_send_all(config, server, missing, shards, progress))
            seconds = time.monotonic() - started
    return _finish(plan, store, shards, verifier, sum(len(sample.token_ids) for sample in missing), seconds)


def _server_arguments(
    config: RetrainConfig, plan: StagePlan, store: Store, verifier: Verifier, layer_ids: list[int]
) -> list[str]:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": cached_layers(layer_ids)}},
    }
    url = str(Path(store.root).resolve()) if store.is_local else store.url
    transfer = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "speculators.hidden_states.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "store_url": url,
            "directory": plan.directory,
            "layer_ids": layer_ids,
            "dtype": config.extract.dtype,
            "shard_bytes": config.extract.shard_mib << 20,
            "idle_flush_s": _IDLE_FLUSH_S,
        },
    }
    is_mimo = verifier.architectures == ["MiMoForCausalLM"]
    overrides = ["--hf-overrides", json.dumps({"architectures": [MIMO_WITH_HIDDEN_STATES]})] if is_mimo else []
    # Without prefix caching every sample's states are computed in its own request: a block shared with a request that
    # was aborted, or whose states were never cached, would hold nothing.
    return [
        "--no-enable-prefix-caching",
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(transfer),
        *overrides,
    ]


async def _send_all(
    config: RetrainConfig, server: VllmServer, samples: list[Sample], shards: _Shards, progress: Progress
) -> None:
    section = config.regenerate
    wanted = sum(len(sample.token_ids) for sample in samples)
    progress.start("extract", wanted, "tokens")
    before, started = shards.tokens, time.monotonic()

    async def watch(sending: asyncio.Task[None]) -> None:
        """Until every sample is in the store; a server that died or stalls is an error."""
        last_tokens, last_change = shards.tokens, time.monotonic()
        while shards.missing():
            await asyncio.sleep(0.5)
            server.check_alive()
            await asyncio.to_thread(shards.refresh)
            now = time.monotonic()
            if shards.tokens != last_tokens or not sending.done():
                last_tokens, last_change = shards.tokens, now
            if now - last_change > _STALLED_S:
                raise ServingError(
                    f"vLLM answered everything, but {len(shards.missing())} samples did not reach the store within"
                    f" {_STALLED_S:.0f} s. See {server.log_file}."
                )
            extracted = shards.tokens - before
            progress.update(extracted, tokens_per_s=round(extracted / (now - started), 1))

    async def send(client: VllmClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                await client_slots.acquire()
                tasks.create_task(send_one(client, sample))

    async def send_one(client: VllmClient, sample: Sample) -> None:
        try:
            await client.complete(
                sample.token_ids.tolist(),
                max_tokens=1,
                temperature=0.0,
                kv_transfer_params={"sample_id": sample.sample_id},
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
            raise _cause(server, shards, group) from None
        finally:
            progress.finish()


def _cause(server: VllmServer, shards: _Shards, group: ExceptionGroup[Exception]) -> Exception:
    """The error to show: why the store failed, if it did; what vLLM's log says if that died; else the first one."""
    first: Exception = group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, StoreError):
        return first
    time.sleep(2)  # a worker's death takes the server down a moment later
    try:
        shards.refresh()
        server.check_alive()
    except StoreError as noted:
        return noted
    except ServingError as died:
        message = str(died)
        return StoreError(message.partition("StoreError: ")[2]) if "StoreError: " in message else died
    return first


class _Shards:
    """Which samples are in the store already, as the sidecars say."""

    def __init__(self, store: Store, plan: StagePlan, samples: list[Sample]) -> None:
        self._store, self._plan = store, plan
        self._wanted = {sample.sample_id: sample for sample in samples}
        self._found: dict[str, tuple[str, SampleEntry]] = {}
        self.sidecars: dict[str, Sidecar] = {}
        self.tokens = 0

    def refresh(self) -> None:
        """Read sidecars that are new; of a sample saved twice the first counts.

        Raises:
            StoreError: A writer gave up; says why.
        """
        listed = self._store.list(self._plan.directory)
        there = set(listed)
        for path in listed:
            if not path.endswith(".json") or path in self.sidecars:
                continue
            if path.startswith(self._plan.path(f"{ERRORS}/")):
                raise StoreError(str(self._store.read_json(path)["message"]))
            if not path.startswith(self._plan.path(f"{SHARDS}/")):
                continue
            sidecar = Sidecar.from_json(self._store.read_json(path))
            if self._plan.path(sidecar.shard) not in there:
                continue
            self.sidecars[path] = sidecar
            for entry in sidecar.samples:
                self._note(sidecar.shard, entry)

    def _note(self, shard: str, entry: SampleEntry) -> None:
        sample = self._wanted.get(entry.sample_id)
        if sample is None or entry.sample_id in self._found:
            return
        if entry.tokens == len(sample.token_ids) and entry.token_crc32 == token_checksum(sample.token_ids):
            self._found[entry.sample_id] = shard, entry
            self.tokens += entry.tokens

    def missing(self) -> list[Sample]:
        """Samples that are not in the store."""
        return [sample for sample_id, sample in self._wanted.items() if sample_id not in self._found]

    def index(self) -> pd.DataFrame:
        """One row a sample, in the dataset's order."""
        found = [self._found[sample_id] for sample_id in self._wanted]
        return pd.DataFrame([{"shard": shard, **entry.__dict__} for shard, entry in found])


def _remove_abandoned(store: Store, plan: StagePlan) -> None:
    """Half-written files of killed writers: nobody counts them, but they fill the disk."""
    if store.is_local:
        for file in Path(store.full_path(plan.path(SHARDS))).glob(f".*{TEMPORARY_MARK}*"):
            if time.time() - file.stat().st_mtime > _ABANDONED_S:  # a younger one may be another run's
                file.unlink(missing_ok=True)


def _finish(
    plan: StagePlan, store: Store, shards: _Shards, verifier: Verifier, computed: int, seconds: float
) -> Manifest:
    index = shards.index()
    used = set(index["shard"])
    kept = [sidecar for sidecar in shards.sidecars.values() if sidecar.shard in used]
    names = {
        f"{sidecar.shard.removesuffix('.safetensors')}{end}" for sidecar in kept for end in (".safetensors", ".json")
    }
    for path in store.list(plan.path(SHARDS)):
        if path.removeprefix(f"{plan.directory}/") not in names:
            store.delete(path)  # left by a writer that was killed
    _remove_abandoned(store, plan)
    buffer = io.BytesIO()
    index.to_parquet(buffer, index=False)
    store.write_bytes(plan.path(INDEX_FILE), buffer.getvalue())
    total = sum(sidecar.bytes for sidecar in kept)
    files: dict[str, str | None] = {INDEX_FILE: None}
    files.update({sidecar.shard: sidecar.sha256 for sidecar in kept})
    tokens = int(index["tokens"].sum())
    return plan.complete(
        store,
        files,
        {
            "samples": len(index),
            "tokens": tokens,
            "bytes": total,
            "bytes_per_token": round(total / tokens, 1),
            "tokens_per_s": round(computed / seconds, 1) if seconds else None,
            "shards": len(kept),
            "hidden_size": verifier.hidden_size,
        },
    )


def _check_space(
    config: RetrainConfig, store: Store, verifier: Verifier, samples: list[Sample], layer_ids: list[int]
) -> None:
    """Hidden states are large: say so before the disk is full."""
    width = DTYPES[config.extract.dtype].itemsize * len(layer_ids) * verifier.hidden_size
    needed = int(_SPACE_MARGIN * width * sum(len(sample.token_ids) for sample in samples))
    free = store.free_bytes()
    if free is not None and needed > free:
        raise StoreError(
            f"The hidden states need about {needed / 2**30:.2f} GiB ({width} bytes a token), but only"
            f" {free / 2**30:.2f} GiB are free in {store.url}. Free some space, set `store` to a place with more (s3://"
            " works), or lower regenerate.max_prompts."
        )
