"""How hidden states lie in the store: docs/hidden_states.md says it in full.

``shards/<writer>-<n>.safetensors`` holds samples one after another, each as a few tensors that are one contiguous range
of bytes. ``shards/<writer>-<n>.json``, its sidecar, is written after it and lists its samples: a shard without sidecar
does not count. ``index.parquet``, written when all samples are there, is all that reading needs.
``errors/<writer>.json`` tells whoever waits why a writer gave up.

A sample of n tokens has n - 1 rows: the state at its last token would predict a token that is not in it, so no method
reads it. Rows of the last layer are kept from ``last_from`` on: before, they predict tokens without a loss.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from speculators.config import Compression, StateDtype

SHARDS, ERRORS, INDEX_FILE = "shards", "errors", "index.parquet"
FORMAT_VERSION = 2
DTYPES = {"float8_e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SAFETENSORS_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.uint8: "U8",
}
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_ZSTD_LEVEL = 1
# Names of a sample's tensors, in the order of their bytes.
_AUX_SCALE, _LAST_SCALE, _AUX, _LAST, _COMPRESSED = "aux_scale", "last_scale", "aux", "last", "zstd"


@dataclass(frozen=True)
class EncodedStates:
    """A sample's hidden states as they are stored, before compression.

    Attributes:
        rows: Positions that have states.
        last_from: First of them that has the last layer's.
        tensors: ``aux`` [rows, n_aux, H] and ``last`` [rows - last_from, H] in their stored dtypes; for float8_e4m3
            also ``aux_scale`` float32 [rows, n_aux] and ``last_scale`` float32 [rows - last_from].
    """

    rows: int
    last_from: int
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True)
class StateFormat:
    """What all samples of a set have in common.

    Attributes:
        layer_ids: What a row holds: auxiliary layers, then the verifier's last layer before its final norm.
        dtype: Of the auxiliary layers as stored.
        last_dtype: Of the last layer as stored.
        compression: Of each sample by itself.
    """

    layer_ids: tuple[int, ...]
    dtype: StateDtype
    last_dtype: StateDtype
    compression: Compression = "none"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StateFormat:
        """Read back what :meth:`to_json` gave."""
        return cls(**{**value, "layer_ids": tuple(value["layer_ids"])})

    @property
    def needs_last_everywhere(self) -> bool:
        """Whether every row's last layer is read: by a head that has no auxiliary layers."""
        return len(self.layer_ids) == 1

    def row_bytes(self, hidden_size: int) -> tuple[int, int]:
        """Bytes of one row before compression: of the auxiliary layers, and of the last one."""
        n_aux = len(self.layer_ids) - 1
        aux = n_aux * (DTYPES[self.dtype].itemsize * hidden_size + 4 * (self.dtype == "float8_e4m3"))
        last = DTYPES[self.last_dtype].itemsize * hidden_size + 4 * (self.last_dtype == "float8_e4m3")
        return aux, last

    def encode(self, states: Tensor, last_from: int) -> EncodedStates:
        """Convert hidden states to how they are stored, on the device where they are.

        Args:
            states: [rows, n_layers, H], any float dtype.
            last_from: First row whose last layer is kept, at most ``rows``.
        """
        tensors: dict[str, Tensor] = {}
        aux, last = states[:, :-1], states[last_from:, -1]
        tensors[_AUX], *aux_scale = _to_stored(aux, DTYPES[self.dtype])
        tensors[_LAST], *last_scale = _to_stored(last, DTYPES[self.last_dtype])
        tensors.update(
            {name: scale[0] for name, scale in ((_AUX_SCALE, aux_scale), (_LAST_SCALE, last_scale)) if scale}
        )
        return EncodedStates(len(states), last_from, tensors)

    def pack(self, sample: EncodedStates) -> dict[str, Tensor]:
        """The tensors of a sample as they go into a shard, in the order of their bytes; on the CPU."""
        ordered = {name: sample.tensors[name].contiguous() for name in self._names()}
        if self.compression == "none":
            return ordered
        # Bytes of the same significance side by side: signs and exponents repeat, mantissas do not.
        planes = b"".join(_planes(tensor).tobytes() for tensor in ordered.values())
        packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(planes)
        return {_COMPRESSED: torch.frombuffer(bytearray(packed), dtype=torch.uint8)}

    def unpack(self, data: bytes | memoryview, rows: int, last_from: int, hidden_size: int) -> EncodedStates:
        """The inverse of :meth:`pack`.

        Args:
            data: The sample's range of a shard.

        Raises:
            ValueError: The bytes are not those of such a sample.
        """
        n_aux, last_rows = len(self.layer_ids) - 1, rows - last_from
        shapes = {
            _AUX_SCALE: (rows, n_aux),
            _LAST_SCALE: (last_rows,),
            _AUX: (rows, n_aux, hidden_size),
            _LAST: (last_rows, hidden_size),
        }
        dtypes = {_AUX: DTYPES[self.dtype], _LAST: DTYPES[self.last_dtype]}
        parts = [(name, shapes[name], dtypes.get(name, torch.float32)) for name in self._names()]
        size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in parts)
        if self.compression == "zstd":
            try:
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1))
            except zstandard.ZstdError as error:
                raise ValueError(f"it cannot be decompressed ({error})") from error
        if len(data) != size:
            raise ValueError(f"it has {len(data)} bytes instead of {size}")
        raw, start = np.frombuffer(data, dtype=np.uint8), 0
        tensors: dict[str, Tensor] = {}
        for name, shape, dtype in parts:
            end = start + math.prod(shape) * dtype.itemsize
            part = raw[start:end]
            if self.compression == "zstd":
                part = _interleave(part.reshape(dtype.itemsize, -1))
            # numpy gives an array without values a stride of 0, which torch cannot view as another dtype.
            values = torch.from_numpy(part.flatten()).view(dtype) if part.size else torch.empty(0, dtype=dtype)
            tensors[name] = values.view(shape)
            start = end
        return EncodedStates(rows, last_from, tensors)

    def decode(self, sample: EncodedStates) -> Tensor:
        """The inverse of :meth:`encode`, but for rounding.

        Returns:
            float32 [rows, n_layers, H]; the last layer is zero before ``last_from``.
        """
        tensors = sample.tensors
        states = torch.empty(sample.rows, len(self.layer_ids), tensors[_LAST].shape[-1])
        _decode_into(states[:, :-1], tensors[_AUX], tensors.get(_AUX_SCALE))
        states[: sample.last_from, -1] = 0
        _decode_into(states[sample.last_from :, -1], tensors[_LAST], tensors.get(_LAST_SCALE))
        return states

    def _names(self) -> list[str]:
        names = [_AUX_SCALE] * (self.dtype == "float8_e4m3") + [_LAST_SCALE] * (self.last_dtype == "float8_e4m3")
        return [*names, _AUX, _LAST]


def _to_stored(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """States [..., H] in ``dtype``; for float8 also the scale [...] that makes the largest value of each row 448."""
    if dtype != torch.float8_e4m3fn:
        return (states.to(dtype),)
    exact = states.float()
    scale = (exact.abs().amax(dim=-1) / _FP8_MAX).clamp(min=_SMALLEST_SCALE)
    return (exact / scale[..., None]).to(dtype), scale


def _decode_into(target: Tensor, stored: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        target.copy_(stored)
        return
    # PyTorch converts float8 value by value. The bits of an e4m3, moved to those of a float16, are 2**-8 times its
    # value; this way is ten times faster. NaN becomes 480, but where one is stored the row's scale is not finite.
    bits = stored.view(torch.int8).to(torch.int16)
    halves = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    torch.mul(halves, (scale * 2.0**8)[..., None], out=target)


def _planes(tensor: Tensor) -> np.ndarray:
    """A tensor's bytes, all first bytes of its values, then all second ones, and so on."""
    return np.frombuffer(tensor_bytes(tensor), dtype=np.uint8).reshape(-1, tensor.element_size()).T


def _interleave(planes: np.ndarray) -> np.ndarray:
    """The inverse of :func:`_planes`; one plane after another, as numpy's transposed copy is ten times slower."""
    values = np.empty(planes.shape[::-1], dtype=np.uint8)
    for place, plane in enumerate(planes):
        values[:, place] = plane
    return values.reshape(-1)


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in its shard.

    Attributes:
        rows: Positions that have states: one fewer than the sample has tokens.
        last_from: First of them that has the last layer's.
        byte_start: First byte in the shard's file.
        byte_end: Byte after its last one.
        crc32: Of these bytes.
        token_crc32: Of the token ids at its rows, see :func:`token_checksum`.
    """

    sample_id: str
    rows: int
    last_from: int
    byte_start: int
    byte_end: int
    crc32: int
    token_crc32: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.byte_end - self.byte_start


@dataclass(frozen=True, kw_only=True)
class IndexEntry(SampleEntry):
    """A row of the index: a sample, and its shard's path in the stage's folder."""

    shard: str


@dataclass(frozen=True)
class Sidecar:
    """What is written beside a shard once it is whole."""

    shard: str
    bytes: int
    sha256: str
    format: StateFormat
    hidden_size: int
    samples: list[SampleEntry]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "format": self.format.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Sidecar:
        """Read back what :meth:`to_json` gave."""
        samples = [SampleEntry(**sample) for sample in value["samples"]]
        return cls(**{**value, "format": StateFormat.from_json(value["format"]), "samples": samples})


def shard_header(samples: Sequence[Mapping[str, Tensor]], entry: SampleEntry | None = None) -> bytes:
    """What precedes the data of a shard: safetensors' header, with the tensors of sample i named ``i.<name>``.

    Written here because a sample's tensors have to lie side by side, and safetensors' own writer sorts them by dtype.

    Args:
        entry: Describes the one sample of a file without sidecar; its range counts from the end of the header.
    """
    metadata = {"format": "pt", "hidden_states_format": str(FORMAT_VERSION)}
    if entry is not None:
        metadata["sample"] = json.dumps(asdict(entry))
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for number, tensors in enumerate(samples):
        for name, tensor in tensors.items():
            end = start + tensor.numel() * tensor.element_size()
            header[f"{number}.{name}"] = {
                "dtype": _SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_sample_file(data: bytes, format: StateFormat, hidden_size: int) -> tuple[SampleEntry, EncodedStates]:
    """The sample of a file that holds one, and what describes it.

    Raises:
        ValueError: The file is damaged.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        entry = SampleEntry(**json.loads(json.loads(data[8:start])["__metadata__"]["sample"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it has no description of a sample ({error})") from error
    content = data[start:]
    if len(content) != entry.size or zlib.crc32(content) != entry.crc32:
        raise ValueError("its checksum is wrong")
    return entry, format.unpack(content, entry.rows, entry.last_from, hidden_size)


def cached_layers(layer_ids: Sequence[int]) -> list[int]:
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
