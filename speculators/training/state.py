"""The state of a training that is under way: written so that a killed run goes on as if nothing had happened.

A state is a safetensors file (trainable parameters, optimiser moments, random generators) and a JSON record (where the
run stands, and the file's SHA-256). ``latest.json`` is a copy of the newest record and is written last, so whatever it
points to is whole. Nothing is pickled.
"""

from __future__ import annotations

import builtins
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from speculators.errors import TrainingError
from speculators.store import Store

logger = logging.getLogger(__name__)
STATE_FORMAT = 1
_POINTER = "latest.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class Standing:
    """Where a run stands after a step.

    Attributes:
        step: Optimiser steps done, over all epochs.
        epoch: The epoch that goes on, from 0.
        position: Steps of that epoch's plan that are done.
        best: Validation figures of the best epoch so far, with ``step`` and ``epoch``; None before the first.
        window: Sums of the metrics since the last record.
        tokens: Tokens trained on, over all ranks.
        seconds: Time spent training, over all runs.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    best: dict[str, Any] | None = None
    window: list[list[float]] | None = None
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StateRecord:
    """A written state: where the run stood, and the file that holds its tensors."""

    standing: Standing
    file: str
    size: int
    sha256: str
    fingerprint: str
    format: int = STATE_FORMAT

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | builtins.bytes) -> StateRecord:
        """Read a record back.

        Raises:
            ValueError: It is not JSON, of another format, or lacks a field.
        """
        value = json.loads(text)
        try:
            if value["format"] != STATE_FORMAT:
                raise ValueError(f"it has format {value['format']}, not {STATE_FORMAT}")
            return cls(**{**value, "standing": Standing(**value["standing"])})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it is not a record of a training state ({error})") from error


class StateStore:
    """Training states of one run, in one folder of the store.

    Args:
        directory: Folder of the states, relative to the store.
        fingerprint: The training's fingerprint; states of another one are not used.
    """

    def __init__(self, store: Store, directory: str, fingerprint: str) -> None:
        self._store, self._directory, self._fingerprint = store, directory, fingerprint

    def save(self, standing: Standing, tensors: Mapping[str, torch.Tensor]) -> StateRecord:
        """Write a state, point to it, and only then remove the older ones.

        Raises:
            StoreError: The store cannot be written; the state before is kept.
        """
        data = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        name = f"step-{standing.step:08d}"
        record = StateRecord(
            dataclasses.replace(standing),
            f"{name}.safetensors",
            len(data),
            hashlib.sha256(data).hexdigest(),
            self._fingerprint,
        )
        self._store.write_bytes(self._path(record.file), data)
        for pointer in (f"{name}.json", _POINTER):
            self._store.write_bytes(self._path(pointer), record.to_json().encode())
        for path in self._store.list(self._directory):
            if not path.endswith(f"/{_POINTER}") and not path.startswith(self._path(name)):
                self._store.delete(path)
        return record

    def latest(self) -> StateRecord | None:
        """The newest whole state of this training, or None where there is none.

        A damaged state, or one of another training, is passed over with a warning; an older one that is still there
        is taken then.

        Raises:
            StoreError: The store cannot be read.
        """
        records = [p for p in self._store.list(self._directory) if p.endswith(".json")]
        for path in sorted(records, key=lambda p: (p.endswith(f"/{_POINTER}"), p), reverse=True):
            try:
                record = StateRecord.from_json(self._store.read_bytes(path))
                if record.fingerprint != self._fingerprint:
                    raise ValueError(f"it belongs to the training {record.fingerprint}, not {self._fingerprint}")
                self._read(record)
            except ValueError as error:
                logger.warning("Training state %s is not used: %s.", self._store.url_of(path), error)
            else:
                return record
        return None

    def load(self, record: StateRecord) -> dict[str, torch.Tensor]:
        """The tensors of a state, on the CPU.

        Raises:
            TrainingError: The file has been damaged since :meth:`latest` found it whole.
        """
        try:
            return load_tensors(self._read(record))
        except ValueError as error:
            raise TrainingError(f"Training state {record.file} cannot be read: {error}. Run again.") from error

    def _read(self, record: StateRecord) -> bytes:
        path = self._path(record.file)
        if not self._store.exists(path):
            raise ValueError(f"its file {record.file} is missing")
        data = self._store.read_bytes(path)
        if len(data) != record.size or hashlib.sha256(data).hexdigest() != record.sha256:
            raise ValueError(f"its file {record.file} is damaged (SHA-256 differs)")
        return data

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"


def capture(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors that a run needs to go on: parameters, AdamW's moments, random generators."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in parameters.items():
        tensors[f"parameter.{name}"] = parameter
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def restore(
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Put back what :func:`capture` took."""
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(tensors[f"parameter.{name}"])
        optimizer.state[parameter] = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}


class MetricsLog:
    """The metrics records of a run, kept in the store as one JSON object a line.

    The file is rewritten at each saved state. After a resume, records past the state are cut off, so no step is in it
    twice.
    """

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self.records: list[dict[str, Any]] = []

    def resume(self, step: int) -> None:
        """Read back what an earlier run wrote up to a step."""
        if not step or not self._store.exists(self._path):
            return
        lines = self._store.read_bytes(self._path).decode().splitlines()
        self.records = [record for record in map(json.loads, lines) if record["step"] <= step]

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it reaches the store at the next :meth:`write`."""
        self.records.append(record)

    def write(self) -> None:
        """Write all records to the store, atomically."""
        self._store.write_bytes(self._path, "".join(json.dumps(r) + "\n" for r in self.records).encode())
