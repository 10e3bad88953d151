"""The verifier's own multi-token-prediction (MTP) head in its checkpoint: read it, and stitch a trained one back in.

Families keep the head under different names; those here are what vLLM's loaders read (vllm/model_executor/models/
mimo_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py, deepseek_mtp.py, glm4_moe_mtp.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"

# Family of each model_type, and where its (first) MTP layer lies.
_FAMILIES = {
    "mimo": "mimo",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm4_moe",
}
_PREFIXES = {
    "mimo": "model.mtp_layers.0.",
    "qwen3_next": "mtp.",
    "qwen3_5": "mtp.",
    "qwen3_5_moe": "mtp.",
    "deepseek_v3": "model.layers.{layers}.",
    "glm4_moe": "model.layers.{layers}.",
}
# Copies of the verifier's embedding and lm_head: vLLM shares the verifier's own instead (llm_base_proposer.py).
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class MtpHead:
    """The tensors of a verifier's MTP head, under its checkpoint's names.

    Attributes:
        tensors: By name, in the checkpoint's dtype.
        files: File of the checkpoint in which each lies.
    """

    tensors: dict[str, Tensor]
    files: dict[str, str]


def mtp_family(config: Mapping[str, Any], architectures: Sequence[str], where: Path) -> str:
    """The family of a verifier's MTP head.

    Args:
        config: The text part of config.json.
        architectures: config.json's ``architectures``. vLLM knows MiMo by them, whatever its model_type is.
        where: Named in the error.

    Raises:
        CheckpointError: It is none of the known ones.
    """
    family = "mimo" if "MiMoForCausalLM" in architectures else _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{where}: model_type {config.get('model_type')!r} has no MTP head that can be trained here. Known types:"
            f" {', '.join(sorted(_FAMILIES))}."
        )
    return family


def mtp_prefix(family: str, num_layers: int) -> str:
    """What the names of the head's tensors start with, in a verifier of ``num_layers`` decoder layers."""
    return _PREFIXES[family].format(layers=num_layers)


def head_names(folder: Path) -> dict[str, str]:
    """Names of the MTP head's tensors, and the file of each.

    Only the first MTP layer counts: vLLM drafts every token with it. Copies of the verifier's embedding and lm_head
    are left out.

    Raises:
        CheckpointError: The checkpoint is of another family or has no MTP head; a file is missing or damaged.
    """
    full = _read_json(folder / "config.json")
    text = full.get("text_config", full)
    family = mtp_family(text, full.get("architectures") or [], folder / "config.json")
    prefix = mtp_prefix(family, int(text["num_hidden_layers"]))
    found = {}
    for name, file in tensor_files(folder).items():
        own = name.removeprefix(prefix)
        is_later_layer = own.startswith("layers.") and not own.startswith("layers.0.")
        if own != name and own not in _COPIES and not is_later_layer and not own.endswith("inv_freq"):
            found[name] = file
    if not found:
        raise CheckpointError(
            f"{folder} has no tensors named {prefix}*: it was saved without its MTP head. Use the original checkpoint."
        )
    return found


def read_mtp_head(folder: Path) -> MtpHead:
    """Read the MTP head of a verifier.

    Raises:
        CheckpointError: As :func:`head_names`; or a tensor is quantised.
    """
    files = head_names(folder)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with open_tensors(folder / file) as opened:
            for name in (name for name, at in files.items() if at == file):
                tensors[name] = opened.get_tensor(name)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES.values():
            raise CheckpointError(
                f"{folder / files[name]}: tensor {name} is {tensor.dtype}. Only an unquantised MTP head (float32,"
                " bfloat16 or float16) can be trained."
            )
    return MtpHead(tensors, files)


def stitch(verifier_folder: Path, trained: Mapping[str, Tensor], target_folder: Path) -> None:
    """A copy of the verifier's checkpoint with trained tensors in place.

    Shards, index and dtypes stay as they are; every other tensor is byte-identical, because only the trained tensors'
    bytes are written over in a copy of their shards. Files that do not change are hard links where the file system
    allows it: do not edit them in place.

    Args:
        trained: By the verifier's own names; converted to the dtype that each has in the checkpoint.
        target_folder: Must not exist. It appears whole or not at all.

    Raises:
        CheckpointError: Names the first tensor that does not fit (unknown, of another shape, quantised in the
            checkpoint, or not finite), or says that the target exists.
    """
    if target_folder.exists():
        raise CheckpointError(f"{target_folder} exists already. Remove it, or choose another folder.")
    files = tensor_files(verifier_folder)
    by_file: dict[str, dict[str, Tensor]] = {}
    for name, tensor in trained.items():
        if name not in files:
            raise CheckpointError(f"{verifier_folder} has no tensor named {name}; the trained one has no place there.")
        by_file.setdefault(files[name], {})[name] = tensor
    patches = {file: _patches(verifier_folder / file, tensors) for file, tensors in by_file.items()}
    with whole_folder(target_folder) as folder:
        for source in sorted(path for path in verifier_folder.rglob("*") if path.is_file()):
            relative = source.relative_to(verifier_folder)
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            if (changes := patches.get(str(relative))) is not None:
                _copy_patched(source, folder / relative, changes)
            else:
                _link(source, folder / relative)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name at the end, and is removed when something fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor of a checkpoint, by the tensor's name.

    Raises:
        CheckpointError: There are no safetensors, or the index or a file is damaged.
    """
    if (folder / INDEX_FILE).is_file():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX_FILE} is not an index of safetensors files: it has no weight_map.")
        return weight_map
    files: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open_tensors(file) as opened:
            files.update(dict.fromkeys(opened.keys(), file.name))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors with tensors.")
    return files


def open_tensors(file: Path) -> Any:
    """A safetensors file, to read tensors from.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"Cannot read {file} ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def _patches(file: Path, tensors: Mapping[str, Tensor]) -> list[tuple[int, bytes]]:
    """Where in a safetensors file which bytes go, so that it holds these tensors.

    The format: 8 bytes with the header's length n, little-endian; n bytes of JSON with each tensor's dtype, shape and
    place among the data; the data (https://github.com/huggingface/safetensors#format).
    """
    with open_tensors(file), open(file, "rb") as opened:  # the first checks what the second relies on
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    patches = []
    for name, tensor in tensors.items():
        if name not in header:
            raise CheckpointError(f"{file} has no tensor {name}, but the index says so.")
        entry = header[name]
        if list(tensor.shape) != entry["shape"]:
            raise CheckpointError(f"{file}: {name} is {entry['shape']}; the trained one is {list(tensor.shape)}.")
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{file}: {name} is {entry['dtype']}; only unquantised tensors can be replaced.")
        stored = tensor.detach().cpu().to(_DTYPES[entry["dtype"]])
        if not bool(stored.isfinite().all()):
            raise CheckpointError(f"The trained tensor {name} has values that are not finite in {entry['dtype']}.")
        data = stored.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        patches.append((8 + length + entry["data_offsets"][0], data))
    return patches


def _copy_patched(source: Path, target: Path, patches: Sequence[tuple[int, bytes]]) -> None:
    shutil.copyfile(source, target)
    with open(target, "r+b") as file:
        for offset, data in patches:
            file.seek(offset)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(source: Path, target: Path) -> None:
    """A hard link to the file itself (hub caches hold symbolic links), or a copy on another file system."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
