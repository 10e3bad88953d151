"""A trained MTP head stitched into a copy of its verifier: every other byte stays, whatever the shards and dtypes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.checkpoints.servable import servable
from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.checkpoints.stitch import INDEX_FILE, head_names, read_mtp_head, stitch
from speculators.errors import CheckpointError
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.verifier_head import VerifierHead
from speculators.verifier import Verifier, read_verifier
from tests.models.tiny_mtp import CONFIGS, LAYERS, NAMES, write_mtp_verifier


def shard(folder: Path) -> Verifier:
    """Split the checkpoint into three shards of mixed dtypes, the head over all of them, with further tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number in range(5):
        tensors[f"model.other.{number}.weight"] = torch.randn(7, number + 1)
    tensors["model.other.half"] = torch.randn(9).half()
    tensors["model.other.quantised"] = torch.randint(-9, 9, (5, 3), dtype=torch.int8)
    tensors["model.other.rotary.inv_freq"] = torch.rand(4)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::3]}
        if number:  # the first shard stays in float32
            part = {name: t.bfloat16() if t.dtype == torch.float32 else t for name, t in part.items()}
        save_file(part, folder / file, metadata={"format": "pt", "shard": str(number)})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "notes.txt").write_text("a file in a folder")
    return read_verifier(folder, str(folder), None, folder.parent / "cache")


def stored_bytes(folder: Path) -> dict[str, tuple[str, str, bytes]]:
    """File, dtype and bytes of every tensor, read from the files themselves."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = (file.name, entry["dtype"], data[start:end])
    return found


@pytest.mark.parametrize("family", list(CONFIGS))
def test_only_the_head_changes(family: str, tmp_path: Path) -> None:
    write_mtp_verifier(tmp_path / "verifier", family)
    verifier = shard(tmp_path / "verifier")
    before = stored_bytes(verifier.path)
    drafter = MtpDrafter(MtpConfig.for_folder(verifier.path))
    drafter.load_head(read_mtp_head(verifier.path).tensors)
    for parameter in (p for p in drafter.parameters() if p.requires_grad):
        parameter.data.add_(1.0)
    trained = {name: tensor.detach().contiguous() for name, tensor in drafter.stored_tensors().items()}
    stitch(verifier.path, trained, tmp_path / "stitched")

    after = stored_bytes(tmp_path / "stitched")
    assert after.keys() == before.keys()
    for name, (file, dtype, data) in before.items():
        assert after[name][:2] == (file, dtype)
        if name not in NAMES[family]:
            assert after[name][2] == data, name
    changed = {name for name in before if after[name] != before[name]}
    # Routing's bias is a statistic that training leaves alone.
    assert changed == {name for name in NAMES[family] if not name.endswith("e_score_correction_bias")}
    names = {str(path.relative_to(verifier.path)) for path in verifier.path.rglob("*")}
    assert {str(path.relative_to(tmp_path / "stitched")) for path in (tmp_path / "stitched").rglob("*")} == names
    for file in ("config.json", INDEX_FILE, "tokenizer.json", "original/notes.txt"):
        assert (tmp_path / "stitched" / file).read_bytes() == (verifier.path / file).read_bytes()
    again = read_mtp_head(tmp_path / "stitched")
    for name, tensor in trained.items():
        assert torch.equal(again.tensors[name], tensor.to(again.tensors[name].dtype)), name
    with safe_open(tmp_path / "stitched" / "model-00002-of-00003.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "shard": "1"}
    assert stored_bytes(verifier.path) == before


def test_files_without_a_trained_tensor_are_links(tmp_path: Path) -> None:
    write_mtp_verifier(tmp_path / "verifier", "mimo")
    shard(tmp_path / "verifier")
    name, file = next(iter(sorted(head_names(tmp_path / "verifier").items())))
    tensor = read_mtp_head(tmp_path / "verifier").tensors[name]
    stitch(tmp_path / "verifier", {name: tensor + 1}, tmp_path / "stitched")
    for path in (tmp_path / "verifier").glob("*.safetensors"):
        assert os.path.samefile(path, tmp_path / "stitched" / path.name) == (path.name != file)


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        ({"model.mtp_layers.0.input_proj.bias": torch.zeros(24)}, "no tensor named model.mtp_layers.0.input_proj.bias"),
        ({"model.mtp_layers.0.input_proj.weight": torch.zeros(24, 24)}, r"input_proj.weight is \[24, 48\].*\[24, 24\]"),
        ({"model.mtp_layers.0.input_proj.weight": torch.full((24, 48), torch.nan)}, "not finite"),
        ({"model.other.quantised": torch.zeros(5, 3)}, "is I8; only unquantised"),
    ],
)
def test_what_does_not_fit_is_refused(trained: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    write_mtp_verifier(tmp_path / "verifier", "mimo")
    shard(tmp_path / "verifier")
    with pytest.raises(CheckpointError, match=message):
        stitch(tmp_path / "verifier", trained, tmp_path / "stitched")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("verifier", "cache")] == []


def test_a_value_too_large_for_the_checkpoints_dtype_is_refused(tmp_path: Path) -> None:
    write_mtp_verifier(tmp_path / "verifier", "mimo")
    tensors = load_file(tmp_path / "verifier" / "model.safetensors")
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "verifier" / "model.safetensors", metadata={"format": "pt"})
    trained = {"model.mtp_layers.0.final_layernorm.weight": torch.full((24,), 1e6)}
    with pytest.raises(CheckpointError, match="not finite in F16"):
        stitch(tmp_path / "verifier", trained, tmp_path / "stitched")


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    write_mtp_verifier(tmp_path / "verifier", "mimo")
    (tmp_path / "stitched").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        stitch(tmp_path / "verifier", {}, tmp_path / "stitched")


def test_later_layers_and_copies_are_no_part_of_the_head(tmp_path: Path) -> None:
    """DeepSeek-V3 stores the embedding and lm_head again with its head; vLLM shares the verifier's own."""
    verifier, tensors = write_mtp_verifier(tmp_path / "verifier", "deepseek_v3")
    stored = load_file(verifier.path / "model.safetensors")
    at = f"model.layers.{LAYERS}."
    stored |= {f"{at}embed_tokens.weight": torch.zeros(40, 24), f"{at}shared_head.head.weight": torch.zeros(40, 24)}
    stored |= {f"model.layers.{LAYERS + 1}.enorm.weight": torch.zeros(24)}
    save_file(stored, verifier.path / "model.safetensors", metadata={"format": "pt"})
    assert set(head_names(verifier.path)) == set(tensors)


def test_a_verifier_without_its_head_is_refused(tmp_path: Path) -> None:
    verifier, tensors = write_mtp_verifier(tmp_path / "verifier", "qwen3_next")
    stored = load_file(verifier.path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in stored.items() if name not in tensors}, verifier.path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"no tensors named mtp\.\*"):
        head_names(verifier.path)


@pytest.mark.parametrize("family", ["mimo", "qwen3_next", "glm4_moe"])
def test_a_trained_head_is_a_drafter_of_its_own(family: str, tmp_path: Path) -> None:
    """Saved alone, loaded again, and served from a stitched verifier that is made once."""
    verifier, _ = write_mtp_verifier(tmp_path / "verifier", family)
    drafter = MtpDrafter(MtpConfig.for_folder(verifier.path))
    drafter.initialise(VerifierHead.load(verifier, None))
    drafter.load_head(read_mtp_head(verifier.path).tensors)
    drafter.projection.weight.data.mul_(2)
    save_drafter(drafter, tmp_path / "drafter", verifier, 3, None)
    validate_drafter(tmp_path / "drafter", verifier)
    assert set(load_file(tmp_path / "drafter" / "model.safetensors")) == NAMES[family]
    loaded, mapping, config = load_drafter(tmp_path / "drafter")
    assert mapping is None
    assert config["speculators_model_type"] == "mtp"
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert torch.equal(drafter.embed_tokens, loaded.embed_tokens)

    served = servable(tmp_path / "drafter", verifier, tmp_path / "cache")
    assert json.loads(served.arguments[1]) == {"method": "mtp", "num_speculative_tokens": 3}
    stitched = read_mtp_head(served.model).tensors
    for name, tensor in drafter.stored_tensors().items():
        assert torch.equal(stitched[name], tensor), name
    made = served.model.stat().st_mtime_ns
    assert servable(tmp_path / "drafter", verifier, tmp_path / "cache") == served
    assert served.model.stat().st_mtime_ns == made
