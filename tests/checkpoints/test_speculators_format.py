"""Saving, loading and refusing drafters in the speculators format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.data.vocabulary import VocabMapping
from speculators.errors import CheckpointError
from speculators.verifier import Verifier
from tests.models.test_layers import ROPES
from tests.models.tiny import VOCAB, head_tensors, make_drafter, make_mapping, write_verifier


@pytest.fixture
def tiny(tmp_path: Path) -> Verifier:
    return write_verifier(tmp_path / "verifier")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "norm_before_residual": False, "norm_output": True},
        {"norm_before_fc": True, "fc_norm": True},
        *({"rope_parameters": rope} for rope in ROPES[1:]),
    ],
)
def test_round_trip_is_exact(options: dict[str, Any], dtype: torch.dtype, tiny: Verifier, tmp_path: Path) -> None:
    drafter, mapping = make_drafter(**options).to(dtype), make_mapping()
    save_drafter(drafter, tmp_path / "drafter", tiny, 3, mapping)
    validate_drafter(tmp_path / "drafter", tiny)
    loaded, loaded_mapping, config = load_drafter(tmp_path / "drafter")
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert loaded.state_dict()[name].dtype == dtype
    assert loaded_mapping is not None
    assert torch.equal(loaded_mapping.t2d, mapping.t2d)
    assert torch.equal(loaded_mapping.d2t, mapping.d2t)
    assert torch.equal(loaded.embed_tokens, head_tensors()["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(
        loaded.layers[0].self_attn._rotary[0].frequencies, drafter.layers[0].self_attn._rotary[0].frequencies
    )
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny.path)
    assert sorted(file.name for file in (tmp_path / "drafter").iterdir()) == ["config.json", "model.safetensors"]


def test_whole_vocabulary_needs_no_mapping(tiny: Verifier, tmp_path: Path) -> None:
    save_drafter(make_drafter(draft_vocab_size=VOCAB), tmp_path / "drafter", tiny, 3, None)
    validate_drafter(tmp_path / "drafter", tiny)
    assert not {"t2d", "d2t"} & load_file(tmp_path / "drafter" / "model.safetensors").keys()
    with pytest.raises(CheckpointError, match="mapping exactly when its vocabulary is reduced"):
        save_drafter(make_drafter(), tmp_path / "other", tiny, 3, None)
    short = VocabMapping(make_mapping().t2d, make_mapping().d2t[:-1])
    with pytest.raises(CheckpointError, match="keeps 15 of 40 tokens; the drafter has 16 of 40"):
        save_drafter(make_drafter(), tmp_path / "other", tiny, 3, short)


def set_value(path: str, value: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    """A change of one value of config.json; None deletes it."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        *parents, leaf = path.split("/")
        target: Any = config
        for parent in parents:
            target = target[int(parent) if isinstance(target, list) else parent]
        if value is None:
            del target[leaf]
        else:
            target[leaf] = value

    return change


def set_tensor(name: str, value: torch.Tensor | None) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    """A change of one tensor; None deletes it."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


NOT_A_NUMBER = torch.ones(24)
NOT_A_NUMBER[3] = float("nan")
LAYER = "transformer_layer_config/"
REFUSED = [
    (set_value("speculators_model_type", "medusa"), "speculators_model_type is 'medusa'"),
    (set_value("transformer_layer_config", None), "lacks transformer_layer_config"),
    (set_value(LAYER + "head_dim", None), "lacks head_dim"),
    (set_value(LAYER + "hidden_size", "24"), "hidden_size is '24'; it must be of type int"),
    (set_value(LAYER + "num_hidden_layers", 0), "num_layers is 0"),
    (set_value(LAYER + "num_key_value_heads", 3), "4 attention heads of head_dim 8 with 3 key-value heads"),
    (set_value(LAYER + "model_type", "gemma"), "model_type is 'gemma'"),
    (set_value(LAYER + "attention_bias", True), "attention_bias is set"),
    (set_value(LAYER + "rope_parameters", {"rope_type": "longrope"}), "rope_type 'longrope' is not supported"),
    (set_value(LAYER + "vocab_size", 50), "vocab_size is 50; the verifier's is 40"),
    (set_value(LAYER + "hidden_size", 32), "hidden_size is 32; the verifier's is 24"),
    (set_value("target_hidden_size", 32), "target_hidden_size is 32; the verifier's is 24"),
    (set_value("draft_vocab_size", 41), "draft_vocab_size is 41; it must be between 1 and the verifier's 40"),
    (set_value("draft_vocab_size", 15), r"lm_head.weight is \[16, 24\]; config.json asks for \[15, 24\]"),
    (set_value("eagle_aux_hidden_state_layer_ids", [2, 4, 8]), "has 8; the verifier has 8 layers"),
    (set_value("eagle_aux_hidden_state_layer_ids", [2, 4, -1]), "has -1"),
    (set_value("eagle_aux_hidden_state_layer_ids", [2, 2, 4]), "must be different layer numbers"),
    (
        set_value("eagle_aux_hidden_state_layer_ids", [2, 4]),
        r"fc.weight is \[24, 72\]; config.json asks for \[24, 48\]",
    ),
    (set_value("speculators_config/proposal_methods", []), "proposal_methods is empty"),
    (set_value("speculators_config/proposal_methods/0/speculative_tokens", 0), "must be at least 1"),
    (set_value("speculators_config/verifier", None), "lacks verifier"),
    (set_value("fc_norm", True), "has no tensor fc_norm.0.weight"),
    (set_tensor("layers.0.mlp.up_proj.weight", None), "has no tensor layers.0.mlp.up_proj.weight"),
    (set_tensor("layers.1.mlp.up_proj.weight", torch.ones(1)), "layers.1.mlp.up_proj.weight is unknown"),
    (set_tensor("embed_tokens.weight", torch.ones(1)), "embed_tokens.weight is unknown"),
    (set_tensor("layers.0.self_attn.k_proj.weight", torch.ones(8, 48)), r"k_proj.weight is \[8, 48\]"),
    (set_tensor("norm.weight", torch.ones(24, dtype=torch.int8)), "norm.weight is torch.int8"),
    (set_tensor("norm.weight", NOT_A_NUMBER), "norm.weight has values that are not finite"),
    (set_tensor("d2t", None), "t2d and d2t must be there both or not at all"),
    (set_tensor("d2t", torch.zeros(16, dtype=torch.int64)), "d2t's 16 offsets"),
    (set_tensor("d2t", make_mapping().d2t.int()), "d2t an int64 vector"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_vllm_could_not_serve_is_refused(
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None], message: str, tiny: Verifier, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    save_drafter(make_drafter(), folder, tiny, 3, make_mapping())
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        validate_drafter(folder, tiny)
    assert str(folder) in str(caught.value)


def test_damaged_and_missing_files(tiny: Verifier, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    with pytest.raises(CheckpointError, match=r"cannot read config\.json"):
        load_drafter(folder)
    save_drafter(make_drafter(), folder, tiny, 3, make_mapping())
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        validate_drafter(folder, tiny)
    for text, message in (("{", "is not valid JSON"), ("[1]", "must hold a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(folder)


def test_unknown_verifier_is_named(tiny: Verifier, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save_drafter(make_drafter(), folder, tiny, 3, make_mapping())
    (tmp_path / "verifier").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"verifier '.*/verifier' is not a folder on this machine"):
        load_drafter(folder)
    load_drafter(folder, tmp_path / "moved")
