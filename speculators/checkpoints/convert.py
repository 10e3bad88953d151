"""Converters between the speculators format and the formats of research code (see research_formats.py)."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from speculators.checkpoints.research_formats import (
    LAYOUTS,
    Layout,
    describe_dflash,
    describe_eagle3,
    detect_method,
    first_layer_prefix,
    read_json,
    read_shape,
    rename,
)
from speculators.checkpoints.speculators_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_config,
    read_weights,
    save_drafter,
    validate_drafter,
)
from speculators.data.vocabulary import VocabMapping
from speculators.errors import CheckpointError, DataError
from speculators.models.dflash import DFlashConfig
from speculators.models.drafter import Drafter, DrafterConfig
from speculators.models.methods import METHODS
from speculators.models.verifier_head import VerifierHead
from speculators.store import TEMPORARY_MARK, write_atomic
from speculators.verifier import Verifier, read_text_config

_WEIGHTS = (WEIGHTS_FILE, "pytorch_model.bin")
_EAGLE3_DRAFTS = 3


@dataclass
class ConversionReport:
    """What became of every tensor.

    Attributes:
        method: ``eagle3`` or ``dflash``.
        used: New name of each tensor that was kept, by its old name.
        dropped: Why each other tensor was left out, by its old name.
        notes: What the source left open and how it was read.
    """

    method: str
    used: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def convert(
    source: Path, target: Path, verifier: Verifier, num_speculative_tokens: int | None = None
) -> ConversionReport:
    """Write a drafter of research code in the speculators format.

    Read are EAGLE-3 of SafeAILab and of SpecForge, and DFlash of z-lab, told apart by config.json and tensor names;
    weights are ``model.safetensors`` or ``pytorch_model.bin``, whole or in shards with an index. Every tensor keeps its
    dtype. An embedding (and DFlash's lm_head) that equals the verifier's is left out, because the format shares it.

    Args:
        source: The research checkpoint.
        target: A folder that does not exist yet; it appears whole or not at all.
        verifier: What the drafter drafts for.
        num_speculative_tokens: Draft length that vLLM uses by default; None for 3 (EAGLE-3) or as many as a block
            drafts (DFlash).

    Raises:
        CheckpointError: The target exists, the format is none of these, a file could run code or is damaged, or a key
            or tensor does not fit; names the first and what was expected.
    """
    _refuse_existing(target)
    config = read_json(source / CONFIG_FILE)
    files = _tensor_files(source)
    method = detect_method(config, files, source)
    shape, notes = read_shape(method, config, files, verifier.num_layers, source / CONFIG_FILE)
    drafts = _draft_length(shape, num_speculative_tokens)
    if (source / "mask_embedding.pt").exists():
        raise CheckpointError(f"{source / 'mask_embedding.pt'}: the speculators format has no embedding of its own.")
    tensors = _read_tensors(files)
    report = ConversionReport(method, notes=notes)
    drafter = _empty_drafter(method, shape)
    mapping = _take_mapping(tensors, shape, report, source)
    _drop_shared(tensors, drafter, verifier, report, source)
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]
        report.dropped[name] = "RoPE frequencies follow from config.json"

    prefix = first_layer_prefix(files)
    found: dict[str, Tensor] = {}
    for old, tensor in tensors.items():
        new = rename(old, prefix, "layers.0.")
        if new in found:
            raise CheckpointError(f"{source}: two tensors stand for {new}; {old} {list(tensor.shape)} is one of them.")
        found[new] = tensor.clone()
        report.used[old] = new
    _check_tensors(found, drafter, lambda name: rename(name, "layers.0.", prefix), source)
    drafter.to(found["fc.weight"].dtype)  # what config.json names; the next line keeps each tensor's own
    drafter.load_state_dict(found, strict=False, assign=True)  # a shared lm_head is not among them
    with _new_folder(target) as folder:
        save_drafter(drafter, folder, verifier, drafts, mapping)
        try:
            validate_drafter(folder, verifier)
        except CheckpointError as error:
            problem = str(error).replace(f"{folder}/", "").replace(str(folder), str(target))
            raise CheckpointError(f"{source} does not fit the verifier {verifier.source}: {problem}") from error
    return report


def convert_back(source: Path, target: Path, layout: Layout) -> ConversionReport:
    """Write a drafter of the speculators format as research code and other engines (SGLang) read it.

    Args:
        source: A drafter in the speculators format.
        target: A folder that does not exist yet; it appears whole or not at all.
        layout: ``safeailab`` or ``specforge`` (EAGLE-3), ``z-lab`` (DFlash).

    Raises:
        CheckpointError: The target exists, the drafter is of another method or has what that layout's code does not
            compute, or a tensor does not fit; says which.
    """
    _refuse_existing(target)
    config, where = read_config(source), source / CONFIG_FILE
    method = config["speculators_model_type"]
    if method != LAYOUTS[layout]:
        raise CheckpointError(f"{source} is a drafter of method {method}; the layout {layout} is {LAYOUTS[layout]}'s.")
    num_layers = _verifier_layers(config)
    if method == "eagle3":
        described, notes = describe_eagle3(config, layout, num_layers, where)
    else:
        described, notes = describe_dflash(config, num_layers, where)
    tensors, mapping = read_weights(source)
    shape, _ = read_shape(method, described, tensors, num_layers, where)
    _check_tensors(tensors, _empty_drafter(method, shape), str, source)
    report = ConversionReport(method, notes=notes)
    prefix = "midlayer." if method == "eagle3" else "layers.0."
    report.used = {name: rename(name, "layers.0.", prefix) for name in tensors}
    written = {report.used[name]: tensor for name, tensor in tensors.items()}
    sizes = None if mapping is None else (len(mapping.d2t), len(mapping.t2d))
    wanted = None if shape.draft_vocab_size == shape.vocab_size else (shape.draft_vocab_size, shape.vocab_size)
    if sizes != wanted:
        raise CheckpointError(f"{source}: lengths of d2t and t2d are {sizes}; config.json asks for {wanted}.")
    if mapping is not None:
        report.used |= {"d2t": "d2t", "t2d": "t2d"}
        written |= {"d2t": mapping.d2t, "t2d": mapping.t2d}
    with _new_folder(target) as folder:
        write_atomic(folder / WEIGHTS_FILE, save(written, metadata={"format": "pt"}))
        write_atomic(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())
    return report


def _draft_length(shape: DrafterConfig, asked: int | None) -> int:
    most = shape.drafts if isinstance(shape, DFlashConfig) else None
    drafts = asked if asked is not None else most or _EAGLE3_DRAFTS
    if drafts < 1 or (most is not None and drafts > most):
        limit = f"between 1 and {most}, what its block drafts" if most is not None else "at least 1"
        raise CheckpointError(f"num_speculative_tokens is {drafts}; for this drafter it must be {limit}.")
    return drafts


def _empty_drafter(method: str, shape: DrafterConfig) -> Drafter:
    with torch.device("meta"):
        return METHODS[method].drafter(shape)


def _verifier_layers(config: dict[str, Any]) -> int | None:
    """Decoder layers of the verifier that a drafter names, if that is a folder on this machine."""
    try:
        folder = Path(config["speculators_config"]["verifier"]["name_or_path"])
    except (KeyError, TypeError):
        return None
    return int(read_text_config(folder)["num_hidden_layers"]) if folder.is_dir() else None


def _take_mapping(
    tensors: dict[str, Tensor], shape: DrafterConfig, report: ConversionReport, source: Path
) -> VocabMapping | None:
    """Take ``d2t`` and ``t2d`` out of the tensors; without ``t2d``, rebuild it."""
    stored: dict[str, Tensor] = {name: tensors.pop(name).clone() for name in ("d2t", "t2d") if name in tensors}
    for name, size, dtype in (("d2t", shape.draft_vocab_size, torch.int64), ("t2d", shape.vocab_size, torch.bool)):
        tensor = stored.get(name)
        if tensor is not None and (tuple(tensor.shape) != (size,) or tensor.dtype != dtype):
            raise CheckpointError(
                f"{source}: tensor {name} is {tensor.dtype} {list(tensor.shape)}; expected is {dtype} [{size}]."
            )
    is_reduced = shape.draft_vocab_size < shape.vocab_size
    if "d2t" not in stored:
        if stored or is_reduced:
            raise CheckpointError(f"{source} has no tensor d2t; expected is torch.int64 [{shape.draft_vocab_size}].")
        return None
    mapping = VocabMapping(stored.get("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool)), stored["d2t"])
    if "t2d" not in stored:
        kept = mapping.kept_ids
        if not bool(((kept >= 0) & (kept < shape.vocab_size)).all()):
            raise CheckpointError(f"{source}: d2t leads out of the vocabulary of {shape.vocab_size} tokens.")
        mapping.t2d[kept] = True
        report.notes.append("t2d was missing and follows from d2t")
    try:
        mapping.validate()
    except DataError as error:
        raise CheckpointError(f"{source}: {error}") from error
    if not is_reduced:  # validate() has seen that every token stands for itself
        report.dropped |= dict.fromkeys(stored, "the draft vocabulary is the whole one")
        return None
    report.used |= {name: name for name in stored}
    return mapping


def _drop_shared(
    tensors: dict[str, Tensor], drafter: Drafter, verifier: Verifier, report: ConversionReport, source: Path
) -> None:
    """Leave out what the speculators format shares with the verifier; refuse what only looks like it."""
    shared = ["embed_tokens.weight", *(["lm_head.weight"] if drafter.shares_lm_head else [])]
    present = [name for name in shared if name in tensors]
    head = VerifierHead.load(verifier, None) if present else None
    for name in present:
        assert head is not None
        tensor = tensors.pop(name)
        own = head.embed_tokens if name == "embed_tokens.weight" else head.lm_head
        if not torch.equal(tensor, own.to(tensor.dtype)):
            raise CheckpointError(
                f"{source}: tensor {name} {list(tensor.shape)} is not the verifier's {list(own.shape)}. vLLM would load"
                " it from the research folder as the drafter's own; drafters in the speculators format share the"
                " verifier's here, so this one would draft worse. Serve the research folder itself, or name the"
                " verifier that it was trained for."
            )
        report.dropped[name] = "equal to the verifier's, which is shared"


def _check_tensors(found: dict[str, Tensor], drafter: Drafter, shown: Callable[[str], str], source: Path) -> None:
    """Check names, shapes and types.

    Args:
        found: Tensors by their names in the speculators format.
        shown: Turns such a name into that in the source.
    """
    expected = {name: list(tensor.shape) for name, tensor in drafter.stored_tensors().items()}
    for name in sorted(found):
        tensor = found[name]
        if name not in expected:
            known = sorted({re.sub(r"layers\.\d+", "layers.*", shown(other)) for other in expected})
            raise CheckpointError(
                f"{source}: tensor {shown(name)} {list(tensor.shape)} is unknown to a {type(drafter).__name__} of this"
                f" config.json; expected are {', '.join(known)}."
            )
        if list(tensor.shape) != expected[name] or not tensor.is_floating_point():
            raise CheckpointError(
                f"{source}: tensor {shown(name)} is {tensor.dtype} {list(tensor.shape)}; expected is a floating-point"
                f" tensor of shape {expected[name]}."
            )
    for name, size in expected.items():
        if name not in found:
            raise CheckpointError(f"{source} has no tensor {shown(name)}; expected is one of shape {size}.")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint; safetensors are preferred. Reads no more than names."""
    for weights in _WEIGHTS:
        index = folder / f"{weights}.index.json"
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(
                isinstance(name, str) and Path(name).name == name for name in files.values()
            ):
                raise CheckpointError(f"{index}: weight_map must name a file of this folder for each tensor.")
            return {name: folder / file for name, file in files.items()}
        if (folder / weights).is_file():
            return dict.fromkeys(_names(folder / weights), folder / weights)
    raise CheckpointError(f"{folder} has neither {' nor '.join(_WEIGHTS)}, nor an index of either.")


def _names(file: Path) -> list[str]:
    if file.suffix == ".bin":
        return list(_load(file))
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _read_tensors(files: dict[str, Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        loaded, listed = _load(file), {name for name in files if files[name] == file}
        if different := sorted(listed ^ loaded.keys()):
            problem = "is missing in it" if different[0] in listed else "is in it, but not in the index"
            raise CheckpointError(f"{file}: tensor {different[0]} {problem}.")
        tensors |= loaded
    return tensors


def _load(file: Path) -> dict[str, Tensor]:
    """The tensors of one file. Nothing in it is ever executed: a pickle may hold tensors only."""
    try:
        if file.suffix != ".bin":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing, though the index names it.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than tensors; loading that could run code, so it is refused. Ask for safetensors."
        ) from error
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors as torch.save has written them since torch 1.6: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__}; expected are tensors by name.")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{file} holds more than tensors: {name!r} is a {type(value).__name__}.")
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{target} exists already; give a folder that does not.")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling that takes the target's name when all is written."""
    temporary = target.parent / f".{target.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:12]}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
