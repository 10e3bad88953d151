"""The command's own parts: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from speculators import cli
from speculators.checkpoints.speculators_format import read_config, read_weights, save_drafter
from tests.models.tiny import make_drafter, make_mapping, write_verifier

COMMANDS = [
    "regenerate-responses",
    "prepare-data",
    "generate-offline-data",
    "train",
    "export",
    "evaluate",
    "plan",
    "convert",
    "stitch",
]


def test_every_command_has_help() -> None:
    listed = CliRunner().invoke(cli.app, ["--help"]).output
    for command in COMMANDS:
        assert command in listed
        assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0


def test_convert_there_and_back(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    drafter = make_drafter(norm_before_residual=False)
    save_drafter(drafter, tmp_path / "ours", verifier, 3, make_mapping())
    out = CliRunner().invoke(
        cli.app, ["convert", str(tmp_path / "ours"), str(tmp_path / "research"), "--to", "specforge"]
    )
    assert out.exit_code == 0, out.output
    assert "eagle3" in out.output
    back = CliRunner().invoke(
        cli.app,
        ["convert", str(tmp_path / "research"), str(tmp_path / "back"), "--verifier", str(verifier.path)],
    )
    assert back.exit_code == 0, back.output
    assert "note: " in back.output  # how layer ids were read
    first, second = read_weights(tmp_path / "ours")[0], read_weights(tmp_path / "back")[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_config(tmp_path / "back")["speculators_config"]["verifier"]["name_or_path"] == str(verifier.path)


def test_an_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["speculators", "stitch", str(tmp_path), str(tmp_path), str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {tmp_path} is not a drafter")
    assert "Traceback" not in message
