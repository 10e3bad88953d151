"""The configuration: defaults, YAML files, overrides, and errors that name the file and the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators.config import RetrainConfig, load_config
from speculators.errors import ConfigError


def test_defaults_are_valid() -> None:
    assert load_config() == RetrainConfig()


def test_yaml_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("store: s3://bucket/x\ntrain: {epochs: 9}\n")
    config = load_config(file, ["train.epochs=2", "prepare.draft_vocab_size=null", "serving.endpoints=[http://a:1]"])
    assert config.store == "s3://bucket/x"
    assert config.train.epochs == 2
    assert config.prepare.draft_vocab_size is None
    assert config.serving.endpoints == ["http://a:1"]


def test_unknown_field_names_file_field_and_known_fields(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("train: {epoch: 3}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert str(file) in str(error.value)
    assert "train.epoch: unknown field" in str(error.value)
    assert "epochs" in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train: {epochs: zero}", "train.epochs"),
        ("train: {epochs: 0}", "greater than or equal to 1"),
        ("- a\n- b", "must hold a mapping"),
        ("train: {epochs: [}", "not valid YAML"),
        ("prepare: {max_length: 1024}", "prepare.max_length (1024) must be below serving.max_model_len"),
    ],
)
def test_wrong_values(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert part in str(error.value)


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config("nowhere.yaml")


def test_override_without_value() -> None:
    with pytest.raises(ConfigError, match="must look like"):
        load_config(None, ["train.epochs"])


@pytest.mark.parametrize("file", sorted((Path(__file__).parent.parent / "infra" / "configurations").glob("*.yaml")))
def test_shipped_configurations_are_valid(file: Path) -> None:
    assert load_config(file) != RetrainConfig()
