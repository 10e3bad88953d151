"""Reads hidden states sample by sample, by range, with checksums."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from speculators.errors import StoreError
from speculators.hidden_states.format import DTYPES, INDEX_FILE, token_checksum
from speculators.manifest import StagePlan
from speculators.store import Store


class HiddenStateReader:
    """A finished set of hidden states.

    Args:
        store: Where it lies.
        plan: The extraction that made it.

    Attributes:
        layer_ids: What the second dimension of a sample stands for: auxiliary layers, then the last layer.
        hidden_size: H.
        dtype: Stored dtype.
        sample_ids: All samples, in the index's order.

    Raises:
        MissingStageError: The extraction has not finished.
        StoreError: The index is not the one that the manifest describes.
    """

    def __init__(self, store: Store, plan: StagePlan) -> None:
        self._store, self._plan = store, plan
        manifest = plan.require(store, "speculators generate-offline-data")
        data = store.read_bytes(plan.path(INDEX_FILE))
        if hashlib.sha256(data).hexdigest() != manifest.outputs[INDEX_FILE]["sha256"]:
            raise StoreError(
                f"{store.url_of(plan.path(INDEX_FILE))} is not the file that its manifest describes. Delete"
                f" {store.url_of(plan.directory)} to have it made anew."
            )
        self._index = {row.sample_id: row for row in pd.read_parquet(io.BytesIO(data)).itertuples()}
        self.layer_ids: list[int] = list(plan.determinants["layer_ids"])
        self.hidden_size = int(manifest.figures["hidden_size"])
        self.dtype = DTYPES[plan.determinants["dtype"]]
        self.sample_ids = list(self._index)

    def tokens(self, sample_id: str) -> int:
        """Number of tokens of a sample.

        Raises:
            StoreError: There is no such sample.
        """
        return int(self._entry(sample_id).tokens)

    def read(self, sample_id: str) -> Tensor:
        """Hidden states of a sample, [tokens, n_layers, H] in the stored dtype.

        Raises:
            StoreError: There is no such sample, or its bytes are not those that were written; names shard and sample.
        """
        entry = self._entry(sample_id)
        path = self._plan.path(entry.shard)
        data = self._store.read_range(path, int(entry.byte_start), int(entry.byte_end))
        if zlib.crc32(data) != int(entry.crc32):
            raise StoreError(
                f"{self._store.url_of(path)} is damaged: the checksum of sample {sample_id} is wrong. Delete"
                f" {self._store.url_of(self._plan.directory)} to have it extracted anew."
            )
        flat = torch.frombuffer(bytearray(data), dtype=self.dtype)
        return flat.view(int(entry.tokens), len(self.layer_ids), self.hidden_size)

    def check_tokens(self, sample_id: str, token_ids: Sequence[int]) -> None:
        """Check that a sample's hidden states are of these tokens.

        Raises:
            StoreError: They are not.
        """
        entry = self._entry(sample_id)
        if int(entry.tokens) != len(token_ids) or int(entry.token_crc32) != token_checksum(token_ids):
            raise StoreError(
                f"{self._store.url_of(self._plan.directory)}: the hidden states of sample {sample_id} are of other"
                " tokens than the dataset's."
            )

    def _entry(self, sample_id: str):  # type: ignore[no-untyped-def]  # a row of the index, as pandas makes it
        try:
            return self._index[sample_id]
        except KeyError:
            raise StoreError(f"{self._store.url_of(self._plan.directory)} has no sample {sample_id}.") from None
