"""How hidden states lie in the store.

``shards/<writer>-<n>.safetensors`` holds one tensor ``hidden_states`` [rows, n_layers, H], samples one after another,
so a sample is one contiguous range of bytes. ``shards/<writer>-<n>.json``, its sidecar, is written after it and lists
its samples: a shard without sidecar does not count. ``index.parquet``, written when all samples are there, is all that
reading needs. ``errors/<writer>.json`` tells whoever waits why a writer gave up.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHARDS, ERRORS, INDEX_FILE, TENSOR_NAME = "shards", "errors", "index.parquet", "hidden_states"
FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in its shard.

    Attributes:
        row: First of its rows.
        tokens: Number of its rows.
        byte_start: First byte in the shard's file.
        byte_end: Byte after its last one.
        crc32: Of these bytes.
        token_crc32: Of its token ids, see :func:`token_checksum`.
    """

    sample_id: str
    row: int
    tokens: int
    byte_start: int
    byte_end: int
    crc32: int
    token_crc32: int


@dataclass(frozen=True)
class Sidecar:
    """What is written beside a shard once it is whole."""

    shard: str
    bytes: int
    sha256: str
    layer_ids: list[int]
    dtype: str
    hidden_size: int
    samples: list[SampleEntry]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Sidecar:
        """Read back what :meth:`to_json` gave."""
        return cls(**{**value, "samples": [SampleEntry(**sample) for sample in value["samples"]]})


def cached_layers(layer_ids: list[int]) -> list[int]:
    """Order in which vLLM caches layers: rising, each once, however they were asked for.

    From ``_set_aux_hidden_state_layers`` in vllm/model_executor/models/interfaces.py.
    """
    return sorted(set(layer_ids))


def token_checksum(token_ids: Any) -> int:
    """CRC-32 of token ids as little-endian int32: ties hidden states to the tokens that they are of."""
    return zlib.crc32(np.asarray(token_ids, dtype="<i4").tobytes())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor, without a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def data_offset(safetensors_file: bytes | memoryview) -> int:
    """Where a safetensors file's tensor data begin: 8 bytes of length, then the JSON header."""
    return 8 + int.from_bytes(safetensors_file[:8], "little")
