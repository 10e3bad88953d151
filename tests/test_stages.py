"""What could not be trained or served is refused before any stage runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculators import stages
from speculators.checkpoints.speculators_format import save_drafter
from speculators.config import RetrainConfig
from speculators.errors import PipelineError
from tests.models.tiny import make_drafter, make_mapping, write_verifier
from tests.models.tiny_mtp import write_mtp_verifier


def open_run(folder: Path, verifier: Path, **sections: Any) -> stages.Retraining:
    values = {
        "store": str(folder / "store"),
        "work_dir": str(folder / "work"),
        "verifier": {"model": str(verifier)},
        "serving": {"max_model_len": 64},
        "regenerate": {"max_tokens": 16},
        "prepare": {"max_length": 63},
    }
    merged = {key: {**values.get(key, {}), **value} for key, value in sections.items()}  # type: ignore[dict-item]
    return stages.open_retraining(RetrainConfig.model_validate({**values, **merged}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"extract": {"aux_layer_ids": [2, 4, 8]}},
            r"layer 8 does not exist; .* has 8 decoder layers.*\(embedding\) to 7",
        ),
        ({"extract": {"aux_layer_ids": [-1]}}, "layer -1 does not exist"),
        ({"prepare": {"draft_vocab_size": 41}}, r"draft_vocab_size \(41\) exceeds the verifier's vocabulary \(40\)"),
        (
            {"train": {"method": "dflash2"}, "prepare": {"draft_vocab_size": 16}},
            r"draft_vocab_size \(16\): vLLM serves dflash2 with the verifier's whole vocabulary only.*set it to 40",
        ),
        ({"train": {"method": "mtp"}}, "model_type 'llama' has no MTP head that can be trained here"),
        ({"serving": {"max_model_len": 65}}, r"max_model_len \(65\) is more than .* can: 64"),
        ({"train": {"init_from": "nowhere"}}, "nowhere is not a drafter"),
    ],
)
def test_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_verifier(tmp_path / "verifier")
    with pytest.raises(PipelineError, match=message):
        open_run(tmp_path, tmp_path / "verifier", **sections)
    assert not list((tmp_path / "store").rglob("*.*"))


def test_heads_that_no_drafter_can_have_are_refused(tmp_path: Path) -> None:
    write_verifier(tmp_path / "verifier", head_dim=7)
    with pytest.raises(PipelineError, match=r"4 attention heads of size 7 .* an even head size"):
        open_run(tmp_path, tmp_path / "verifier")


def test_a_drafter_to_start_from_has_to_fit(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    save_drafter(make_drafter(), tmp_path / "drafter", verifier, 3, make_mapping())
    open_run(tmp_path, verifier.path, train={"init_from": str(tmp_path / "drafter")})
    with pytest.raises(PipelineError, match=r"is a drafter of eagle3; dspark can start from .* or of dflash"):
        open_run(tmp_path, verifier.path, train={"method": "dspark", "init_from": str(tmp_path / "drafter")})
    write_verifier(tmp_path / "wider", vocab_size=48)
    with pytest.raises(PipelineError, match="vocab_size is 40; the verifier's is 48"):
        open_run(tmp_path, tmp_path / "wider", train={"init_from": str(tmp_path / "drafter")})


def test_an_mtp_head_reads_the_last_layer_only(tmp_path: Path) -> None:
    verifier, _ = write_mtp_verifier(tmp_path / "verifier", "glm4_moe")
    open_run(tmp_path, verifier.path, train={"method": "mtp"})
    with pytest.raises(PipelineError, match="an MTP head reads the last layer only"):
        open_run(tmp_path, verifier.path, train={"method": "mtp"}, extract={"aux_layer_ids": [2]})
