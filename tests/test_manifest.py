"""Fingerprints and manifests."""

from __future__ import annotations

import pytest

from speculators.errors import MissingStageError, StoreError
from speculators.manifest import MANIFEST_NAME, Stage, StagePlan
from speculators.store import Store


def plan(**determinants: object) -> StagePlan:
    return StagePlan(Stage.PREPARE, dict(determinants))


def test_fingerprint_depends_on_content_not_on_order() -> None:
    assert plan(a=1, b=[2, 3]).fingerprint == plan(b=[2, 3], a=1).fingerprint
    assert plan(a=1).fingerprint != plan(a=2).fingerprint
    assert plan(a=1).fingerprint != StagePlan(Stage.TRAIN, {"a": 1}).fingerprint


def test_unfinished_until_the_manifest_is_there(store: Store) -> None:
    stage = plan(a=1)
    store.write_bytes(stage.path("data.bin"), b"abc")
    assert stage.finished(store) is None
    with pytest.raises(MissingStageError, match="speculators prepare-data"):
        stage.require(store, "speculators prepare-data")
    written = stage.complete(store, {"data.bin": None}, {"rows": 3})
    assert stage.finished(store) == written == stage.require(store, "x")
    assert written.outputs["data.bin"]["bytes"] == 3
    assert written.figures == {"rows": 3}


def test_a_manifest_of_something_else_is_refused(store: Store) -> None:
    one, other = plan(a=1), plan(a=2)
    one.complete(store, {}, {})
    store.write_bytes(other.path(MANIFEST_NAME), store.read_bytes(one.path(MANIFEST_NAME)))
    with pytest.raises(StoreError, match=one.fingerprint):
        other.finished(store)


def test_damaged_and_newer_manifests_are_refused(store: Store) -> None:
    stage = plan(a=1)
    store.write_bytes(stage.path(MANIFEST_NAME), b'{"manifest_ver')
    with pytest.raises(StoreError, match="not valid JSON"):
        stage.finished(store)
    store.write_json(stage.path(MANIFEST_NAME), {"manifest_version": 99})
    with pytest.raises(StoreError, match="version 99"):
        stage.finished(store)
