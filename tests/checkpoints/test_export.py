"""Export of a finished training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators.checkpoints.export import export
from speculators.checkpoints.speculators_format import load_drafter, save_drafter
from speculators.config import RetrainConfig
from speculators.errors import CheckpointError, MissingStageError
from speculators.manifest import Stage, StagePlan
from speculators.store import Store
from speculators.verifier import Verifier
from tests.models.tiny import make_drafter, make_mapping, write_verifier

CONFIG = RetrainConfig()
TRAIN = StagePlan(Stage.TRAIN, {"extract": "0" * 16})
EXPORT = StagePlan(Stage.EXPORT, {"train": TRAIN.fingerprint})


@pytest.fixture
def tiny(tmp_path: Path) -> Verifier:
    return write_verifier(tmp_path / "verifier")


def finish_training(store: Store, tiny: Verifier, folder: Path, num_speculative_tokens: int = 3) -> None:
    save_drafter(make_drafter(), folder, tiny, num_speculative_tokens, make_mapping())
    store.upload_folder(folder, TRAIN.path("best"))
    names: dict[str, str | None] = dict.fromkeys(["best/config.json", "best/model.safetensors"])
    TRAIN.complete(store, names, {"best_step": 7})


def test_export_holds_the_drafter_and_its_lineage(store: Store, tiny: Verifier, tmp_path: Path) -> None:
    elsewhere = write_verifier(tmp_path / "elsewhere")
    finish_training(store, elsewhere, tmp_path / "trained")
    manifest = export(CONFIG, EXPORT, TRAIN, store, tiny)
    assert sorted(manifest.outputs) == ["config.json", "lineage.json", "model.safetensors"]
    assert manifest.figures["best_step"] == 7
    folder = Path(store.full_path(EXPORT.directory))
    # It names the verifier as it is found here, not where it was trained.
    _, _, config = load_drafter(folder)
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny.path)
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "trained" / "model.safetensors").read_bytes()
    lineage = json.loads((folder / "lineage.json").read_text())
    assert lineage["drafter"] == EXPORT.fingerprint
    assert lineage["training"] == TRAIN.fingerprint
    assert lineage["aux_layer_ids"] == [2, 4, 5]
    assert lineage["verifier"]["fingerprint"] == tiny.fingerprint
    assert lineage["verifier"]["source"] == "verifier"
    assert "torch" in lineage["versions"]
    assert str(tmp_path) not in (folder / "lineage.json").read_text()
    assert export(CONFIG, EXPORT, TRAIN, store, tiny) == manifest


def test_nothing_is_exported_before_training_or_of_a_bad_drafter(store: Store, tiny: Verifier, tmp_path: Path) -> None:
    with pytest.raises(MissingStageError, match="speculators train"):
        export(CONFIG, EXPORT, TRAIN, store, tiny)
    finish_training(store, tiny, tmp_path / "trained", num_speculative_tokens=5)
    with pytest.raises(CheckpointError, match="trained to propose 5 tokens"):
        export(CONFIG, EXPORT, TRAIN, store, tiny)
    finish_training(store, tiny, tmp_path / "trained")
    smaller = write_verifier(tmp_path / "smaller", num_hidden_layers=5)
    with pytest.raises(CheckpointError, match="has 5; the verifier has 5 layers"):
        export(CONFIG, EXPORT, TRAIN, store, smaller)
    assert EXPORT.finished(store) is None
    assert not store.exists(EXPORT.path("config.json"))
