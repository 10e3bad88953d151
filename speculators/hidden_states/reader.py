"""Reads hidden states sample by sample, by range, with checksums."""

from __future__ import annotations

import hashlib
import io
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from speculators.errors import StoreError
from speculators.hidden_states.cache import RangeCache
from speculators.hidden_states.format import INDEX_FILE, IndexEntry, StateFormat, token_checksum
from speculators.manifest import StagePlan
from speculators.store import Store

logger = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20
_TRIES = 3
DEFAULT_CACHE_BYTES = 32 << 30


@dataclass(frozen=True)
class _Piece:
    """Neighbouring samples of a shard that are fetched together."""

    shard: str
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.shard.rpartition('/')[2]}-{self.start}-{self.end}"


class HiddenStateReader:
    """Hidden states in shards. May be used by several threads at once.

    From a remote store it reads through a cache of this machine. A set that fits into it is fetched in pieces of
    8 MiB, so that each byte comes once and requests are few; of a larger one every sample is fetched by itself.

    Args:
        store: Where they lie.
        directory: The stage's folder.
        format: How they are stored.
        hidden_size: H.
        entries: The samples, in the order of :attr:`sample_ids`.
        cache_bytes: Most bytes that the cache of this machine holds.

    Attributes:
        layer_ids: What the second dimension of a sample stands for: auxiliary layers, then the last layer.
        hidden_size: H.
        sample_ids: All samples.
        parallel_reads: How many threads may usefully read at once.
        read_bytes: Stored bytes of all samples read so far.
        fetched_bytes: Bytes that came from the store so far.
        requests: Requests to the store so far.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        format: StateFormat,
        hidden_size: int,
        entries: Sequence[IndexEntry],
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._store, self._directory, self._format = store, directory, format
        self._index = {entry.sample_id: entry for entry in entries}
        self.layer_ids, self.hidden_size = list(format.layer_ids), hidden_size
        self.sample_ids = list(self._index)
        self.parallel_reads = 4 if store.is_local else 8
        self.read_bytes = self.fetched_bytes = self.requests = 0
        self._cache: RangeCache | None = None
        if not store.is_local:
            self._cache = RangeCache(store.cache_dir / directory, cache_bytes)
        fits = sum(entry.size for entry in entries) <= cache_bytes
        self._pieces = self._cut(_PIECE_BYTES if self._cache is not None and fits else 0)

    @classmethod
    def open(cls, store: Store, plan: StagePlan, cache_bytes: int = DEFAULT_CACHE_BYTES) -> HiddenStateReader:
        """The reader of a finished extraction.

        Raises:
            MissingStageError: The extraction has not finished.
            StoreError: The index is not the one that the manifest describes.
        """
        manifest = plan.require(store, "speculators generate-offline-data")
        data = store.read_bytes(plan.path(INDEX_FILE))
        if hashlib.sha256(data).hexdigest() != manifest.outputs[INDEX_FILE]["sha256"]:
            raise StoreError(
                f"{store.url_of(plan.path(INDEX_FILE))} is not the file that its manifest describes. Delete"
                f" {store.url_of(plan.directory)} to have it made anew."
            )
        rows = pd.read_parquet(io.BytesIO(data)).to_dict("records")
        entries = [IndexEntry(**{str(key): row[key] for key in row}) for row in rows]
        states = StateFormat.from_json(plan.determinants["states"])
        return cls(store, plan.directory, states, int(manifest.figures["hidden_size"]), entries, cache_bytes)

    def has(self, sample_id: str) -> bool:
        """Whether there is such a sample."""
        return sample_id in self._index

    def close(self) -> None:
        """Nothing is held open."""

    def read(self, sample_id: str) -> Tensor:
        """Hidden states of a sample of n tokens.

        Returns:
            float32 [n - 1, n_layers, H]; the last layer is zero in rows where no method needs it.

        Raises:
            StoreError: There is no such sample, or its bytes are not those that were written; names shard and sample.
        """
        entry = self._entry(sample_id)
        piece = self._pieces[sample_id]
        for attempt in range(_TRIES):
            data = self._bytes(entry, piece)
            if len(data) == entry.size and zlib.crc32(data) == entry.crc32:
                break
            # On the way here bytes can change without a trace in the store.
            logger.warning("%s came damaged, try %d of %d.", sample_id, attempt + 1, _TRIES)
            if self._cache is not None:
                self._cache.forget(piece.name)
        else:
            path = f"{self._directory}/{entry.shard}"
            raise StoreError(
                f"{self._store.url_of(path)} is damaged: the checksum of sample {sample_id} is wrong. Delete"
                f" {self._store.url_of(self._directory)} to have it extracted anew."
            )
        self.read_bytes += entry.size
        return self._format.decode(self._format.unpack(data, entry.rows, entry.last_from, self.hidden_size))

    def check_tokens(self, sample_id: str, token_ids: Sequence[int]) -> None:
        """Check that a sample's hidden states are of these tokens.

        Raises:
            StoreError: They are not.
        """
        entry = self._entry(sample_id)
        rows = token_ids[:-1]
        if entry.rows != len(rows) or entry.token_crc32 != token_checksum(rows):
            raise StoreError(
                f"{self._store.url_of(self._directory)}: the hidden states of sample {sample_id} are of other"
                " tokens than the dataset's."
            )

    def _cut(self, piece_bytes: int) -> dict[str, _Piece]:
        """The piece of each sample: samples that follow each other in a shard, as many as there is room for."""
        pieces: dict[str, _Piece] = {}
        members: list[IndexEntry] = []

        def close() -> None:
            if members:
                piece = _Piece(members[0].shard, members[0].byte_start, members[-1].byte_end)
                pieces.update((entry.sample_id, piece) for entry in members)
                members.clear()

        for entry in sorted(self._index.values(), key=lambda entry: (entry.shard, entry.byte_start)):
            if members and (
                entry.shard != members[0].shard
                or entry.byte_start != members[-1].byte_end
                or entry.byte_end - members[0].byte_start > piece_bytes
            ):
                close()
            members.append(entry)
        close()
        return pieces

    def _bytes(self, entry: IndexEntry, piece: _Piece) -> bytes:
        def fetch() -> bytes:
            self.requests += 1
            self.fetched_bytes += piece.end - piece.start
            return self._store.read_range(f"{self._directory}/{piece.shard}", piece.start, piece.end)

        if self._cache is None:
            return fetch()
        return self._cache.read(piece.name, entry.byte_start - piece.start, entry.byte_end - piece.start, fetch)

    def _entry(self, sample_id: str) -> IndexEntry:
        try:
            return self._index[sample_id]
        except KeyError:
            raise StoreError(f"{self._store.url_of(self._directory)} has no sample {sample_id}.") from None
