"""Writes hidden states into shards of the store, in the background and with bounded memory."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch
from safetensors.torch import save
from torch import Tensor

from speculators.errors import StoreError
from speculators.hidden_states.format import (
    DTYPES,
    ERRORS,
    SHARDS,
    TENSOR_NAME,
    SampleEntry,
    Sidecar,
    data_offset,
    tensor_bytes,
)
from speculators.store import Store

logger = logging.getLogger(__name__)


class ShardWriter:
    """Collects samples and writes a shard whenever enough have come, or none has come for a while.

    :meth:`add` blocks while more than two shards' worth waits to be written, so a slow store holds the producer back
    instead of filling the memory. A shard's sidecar is written after the shard: only then do its samples count. When
    the store fails, ``errors/<writer>.json`` is left there if it still can be.

    Args:
        store: Where to.
        directory: The stage's folder.
        layer_ids: What the samples' second dimension stands for.
        dtype: ``bfloat16`` or ``float32``.
        shard_bytes: Target size of a shard.
        idle_flush_s: A shard that is not full is written after so many seconds without a new sample.
        on_failure: Called once, in the writing thread, when the store cannot be written.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        layer_ids: list[int],
        dtype: str,
        shard_bytes: int,
        idle_flush_s: float = 2.0,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._store, self._directory, self._layer_ids = store, directory, list(layer_ids)
        self._dtype_name, self._dtype, self._shard_bytes = dtype, DTYPES[dtype], shard_bytes
        self._idle_flush_s, self._on_failure = idle_flush_s, on_failure
        self._name = f"{time.time_ns():x}-{os.getpid()}"
        self._number = 0
        self._waiting: deque[tuple[str, Tensor, int]] = deque()
        self._waiting_bytes = self._unwritten_bytes = 0
        self._last_added = time.monotonic()
        self._closing = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hidden-states-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, sample_id: str, hidden_states: Tensor, token_crc32: int) -> None:
        """Hand over a sample.

        Args:
            hidden_states: [tokens, n_layers, H] on the CPU, any float dtype; must not be changed afterwards.
            token_crc32: From :func:`speculators.hidden_states.format.token_checksum`.

        Raises:
            StoreError: An earlier shard could not be written.
        """
        stored = hidden_states.to(self._dtype).contiguous()
        size = stored.numel() * stored.element_size()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error or not self._unwritten_bytes or self._unwritten_bytes + size <= 2 * self._shard_bytes
                )
            )
            if self._error is not None:
                raise self._error
            self._waiting.append((sample_id, stored, token_crc32))
            self._waiting_bytes += size
            self._unwritten_bytes += size
            self._last_added = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is left and end the thread.

        Raises:
            StoreError: Something could not be written.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._write(batch)
                with self._changed:
                    self._unwritten_bytes -= sum(s.numel() * s.element_size() for _, s, _ in batch)
                    self._changed.notify_all()
        except BaseException as error:
            logger.error("Hidden states could not be written. %s: %s", type(error).__name__, error)
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._leave_marker(error)
            if self._on_failure is not None:
                self._on_failure(error)

    def _leave_marker(self, error: BaseException) -> None:
        message = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        try:
            self._store.write_json(f"{self._directory}/{ERRORS}/{self._name}.json", {"message": message})
        except Exception as second:  # a store that is full or gone takes no marker either; the log has the error
            logger.warning("Nor could the error be noted in the store: %s", second)

    def _next_batch(self) -> list[tuple[str, Tensor, int]] | None:
        """The samples of the next shard; None when closed and nothing is left."""
        with self._changed:
            while True:
                idle = time.monotonic() - self._last_added >= self._idle_flush_s
                if self._waiting and (self._waiting_bytes >= self._shard_bytes or idle or self._closing):
                    break
                if self._closing:
                    return None
                self._changed.wait(timeout=self._idle_flush_s / 4)
            batch, size = [], 0
            while self._waiting and size < self._shard_bytes:
                batch.append(self._waiting.popleft())
                size += batch[-1][1].numel() * batch[-1][1].element_size()
            self._waiting_bytes -= size
            return batch

    def _write(self, batch: list[tuple[str, Tensor, int]]) -> None:
        name = f"{SHARDS}/{self._name}-{self._number:05d}"
        self._number += 1
        data = save({TENSOR_NAME: torch.cat([states for _, states, _ in batch])})
        entries, row, start = [], 0, data_offset(data)
        for sample_id, states, token_crc32 in batch:
            raw = tensor_bytes(states)
            entries.append(
                SampleEntry(sample_id, row, len(states), start, start + len(raw), zlib.crc32(raw), token_crc32)
            )
            row, start = row + len(states), start + len(raw)
        self._store.write_bytes(f"{self._directory}/{name}.safetensors", data)
        sidecar = Sidecar(
            shard=f"{name}.safetensors",
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            layer_ids=self._layer_ids,
            dtype=self._dtype_name,
            hidden_size=batch[0][1].shape[-1],
            samples=entries,
        )
        self._store.write_json(f"{self._directory}/{name}.json", sidecar.to_json())
