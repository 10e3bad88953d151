"""Writes hidden states into shards of the store, in the background and with bounded memory."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable
from types import TracebackType

from torch import Tensor

from speculators.errors import StoreError
from speculators.hidden_states.format import (
    ERRORS,
    SHARDS,
    EncodedStates,
    SampleEntry,
    Sidecar,
    StateFormat,
    shard_header,
    tensor_bytes,
)
from speculators.store import Store

logger = logging.getLogger(__name__)
_THREADS = 2  # one packs the next shard while the other waits for the store
_HELD_SHARDS = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0


class ShardWriter:
    """Collects samples and writes a shard whenever enough have come, or none has come for a while.

    It holds three shards' worth of samples at most: :meth:`has_room` and :meth:`add` hold the producer back when the
    store is slow. A shard's sidecar is written after the shard: only then do its samples count. A store that does not
    answer is tried again for a while; when it fails for good, ``errors/<writer>.json`` is left if it still can be.

    Args:
        store: Where to.
        directory: The stage's folder.
        format: How samples are stored.
        shard_bytes: Target size of a shard.
        idle_flush_s: A shard that is not full is written after so many seconds without a new sample.
        one_file_each: Write each sample at once into ``<directory>/<sample id>.safetensors``, which describes itself,
            instead of into shards with sidecars.
        patience_s: How long a store that does not answer, or asks to slow down, is tried again.
        on_failure: Called once, in a writing thread, when the store cannot be written.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        format: StateFormat,
        shard_bytes: int,
        idle_flush_s: float = 2.0,
        one_file_each: bool = False,
        patience_s: float = 600.0,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._store, self._directory, self._format = store, directory, format
        self._shard_bytes, self._idle_flush_s, self._patience_s = shard_bytes, idle_flush_s, patience_s
        self._one_file_each, self._on_failure = one_file_each, on_failure
        self._name = f"{time.time_ns():x}-{uuid.uuid4().hex[:8]}"
        self._number = 0
        self._waiting: deque[tuple[str, EncodedStates, int]] = deque()
        self._waiting_bytes = self._held_bytes = 0
        self._last_added = time.monotonic()
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"hidden-states-writer-{n}", daemon=True) for n in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def has_room(self, size: int, announced: int = 0) -> bool:
        """Whether :meth:`add` would take a sample without waiting.

        Args:
            size: Its bytes.
            announced: Bytes of other samples that will be added before it.

        Raises:
            StoreError: An earlier shard could not be written.
        """
        with self._changed:
            return self._has_room(size, announced)

    def add(self, sample_id: str, states: EncodedStates, token_crc32: int) -> None:
        """Hand over a sample; waits until there is room.

        Args:
            states: On the CPU; must not be changed afterwards.
            token_crc32: From :func:`speculators.hidden_states.format.token_checksum`, of the tokens at its rows.

        Raises:
            StoreError: An earlier shard could not be written.
        """
        size = states.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(size))
            self._waiting.append((sample_id, states, token_crc32))
            self._waiting_bytes += size
            self._held_bytes += size
            self._last_added = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is left and end the threads.

        Raises:
            StoreError: Something could not be written.
        """
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _has_room(self, size: int, announced: int = 0) -> bool:
        if self._error is not None:
            raise self._error
        held = self._held_bytes + announced
        return not held or held + size <= _HELD_SHARDS * self._shard_bytes

    def _run(self) -> None:
        try:
            while (written := self._write_next()) is not None:
                with self._changed:
                    self._held_bytes -= written
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _write_next(self) -> int | None:
        """Write the next shard. Its samples' bytes, which are free when this returns; None when there is none."""
        if (batch := self._next_batch()) is None:
            return None
        number, samples = batch
        self._write(number, samples)
        return sum(states.nbytes for _, states, _ in samples)

    def _fail(self, error: BaseException) -> None:
        logger.error("Hidden states could not be written. %s: %s", type(error).__name__, error)
        with self._changed:
            is_first = self._error is None
            self._error = self._error or error
            self._changed.notify_all()
        if not is_first:
            return
        message = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        try:
            self._store.write_json(f"{self._directory}/{ERRORS}/{self._name}.json", {"message": message})
        except Exception as second:  # a store that is full or gone takes no marker either; the log has the error
            logger.warning("Nor could the error be noted in the store: %s", second)
        if self._on_failure is not None:
            self._on_failure(error)

    def _next_batch(self) -> tuple[int, list[tuple[str, EncodedStates, int]]] | None:
        """The number and the samples of the next shard; None when closed and nothing is left, or when all is lost."""
        with self._changed:
            while True:
                if self._error is not None:
                    return None
                idle = time.monotonic() - self._last_added >= self._idle_flush_s
                full = self._waiting_bytes >= self._shard_bytes or self._one_file_each
                if self._waiting and (full or idle or self._closing.is_set()):
                    break
                if self._closing.is_set():
                    return None
                self._changed.wait(timeout=self._idle_flush_s / 4)
            batch, size = [], 0
            while self._waiting and size < (1 if self._one_file_each else self._shard_bytes):
                batch.append(self._waiting.popleft())
                size += batch[-1][1].nbytes
            self._waiting_bytes -= size
            self._number += 1
            return self._number - 1, batch

    def _write(self, number: int, batch: list[tuple[str, EncodedStates, int]]) -> None:
        packed = [self._format.pack(states) for _, states, _ in batch]
        pieces: list[bytes | memoryview] = [tensor_bytes(t) for tensors in packed for t in tensors.values()]
        if self._one_file_each:
            [entry] = self._entries(batch, packed, 0)
            header = shard_header(packed, entry)
            path = f"{self._directory}/{entry.sample_id}.safetensors"
            # Whoever waits for it checks it, and has perhaps removed it already when this returns.
            self._until_done(lambda: self._store.write_pieces(path, [header, *pieces]))
            return
        header = shard_header(packed)
        pieces.insert(0, header)
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        name = f"{SHARDS}/{self._name}-{number:05d}"
        sidecar = Sidecar(
            shard=f"{name}.safetensors",
            bytes=sum(map(len, pieces)),
            sha256=digest.hexdigest(),
            format=self._format,
            hidden_size=batch[0][1].tensors["last"].shape[-1],
            samples=self._entries(batch, packed, len(header)),
        )
        self._until_done(lambda: self._put(sidecar.shard, pieces))
        text = json.dumps(sidecar.to_json(), indent=1).encode()
        self._until_done(lambda: self._put(f"{name}.json", [text]))

    @staticmethod
    def _entries(
        batch: list[tuple[str, EncodedStates, int]], packed: list[dict[str, Tensor]], start: int
    ) -> list[SampleEntry]:
        """Where each sample lies when the first one begins at byte ``start``."""
        entries = []
        for (sample_id, states, token_crc32), tensors in zip(batch, packed, strict=True):
            crc32, end = 0, start
            for raw in map(tensor_bytes, tensors.values()):
                crc32, end = zlib.crc32(raw, crc32), end + len(raw)
            entries.append(SampleEntry(sample_id, states.rows, states.last_from, start, end, crc32, token_crc32))
            start = end
        return entries

    def _put(self, name: str, pieces: list[bytes | memoryview]) -> None:
        """Write a file and see that all of it has arrived."""
        path, size = f"{self._directory}/{name}", sum(len(piece) for piece in pieces)
        try:
            self._store.write_pieces(path, pieces)
        except StoreError:
            # When only the answer was lost, a second try at completing the upload finds none.
            if not self._store.exists(path) or self._store.size(path) != size:
                raise
        if (arrived := self._store.size(path)) != size:
            raise StoreError(
                f"{self._store.url_of(path)} has {arrived} bytes after {size} were written.", is_transient=True
            )

    def _until_done(self, write: Callable[[], None]) -> None:
        """Try until it works; a store that fails for longer than the patience, or for a lasting reason, is an error."""
        deadline, delay = time.monotonic() + self._patience_s, _FIRST_DELAY_S
        while True:
            try:
                return write()
            except StoreError as error:
                if not error.is_transient or time.monotonic() + delay > deadline or self._error is not None:
                    raise
                logger.warning("Trying again in %.0f s: %s", delay, error)
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)
