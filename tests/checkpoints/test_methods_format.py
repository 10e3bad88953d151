"""Drafters of every method in the speculators format: round trips, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.config import TrainConfig
from speculators.errors import CheckpointError
from speculators.models.drafter import DraftSetting
from speculators.models.methods import METHODS
from speculators.models.verifier_head import VerifierHead
from speculators.training.trainer import warm_start
from speculators.verifier import Verifier
from tests.models.tiny import VOCAB, make_mapping, write_verifier

K, MASK = 3, 7
KEYS: dict[str, set[str]] = {
    "eagle3": {"eagle_aux_hidden_state_layer_ids", "norm_before_residual"},
    "peagle": {"eagle_aux_hidden_state_layer_ids", "norm_before_residual", "mask_token_id"},
    "dflash": {"aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor"},
    "dflash2": {"aux_hidden_state_layer_ids", "block_size", "conv_kernel_size", "selector_rank", "selector_top_k"},
    "dspark": {"aux_hidden_state_layer_ids", "block_size", "markov_rank", "markov_head_type", "enable_confidence_head"},
}


@pytest.fixture
def tiny(tmp_path: Path) -> Verifier:
    return write_verifier(tmp_path / "verifier", head_dim=8)


def make(method: str, tiny: Verifier, full: bool = False) -> Any:
    """A drafter with random weights, and its mapping."""
    kind = METHODS[method]
    mapping = None if full or kind.drafter.full_vocabulary else make_mapping()
    head = VerifierHead.load(tiny, mapping.kept_ids if mapping else None)
    setting = DraftSetting(TrainConfig(num_layers=2), [2, 4, 5], len(head.lm_head), K, MASK)
    config = kind.config.for_verifier(tiny, setting)
    if method == "dflash2":
        config = kind.config(**{**config.__dict__, "conv_group_size": 8, "selector_top_k": 4})  # 16 does not divide 24
    torch.manual_seed(0)
    drafter = kind.drafter(config)
    drafter.initialise(head)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    return drafter, mapping


@pytest.mark.parametrize("full", [False, True], ids=["reduced", "whole"])
@pytest.mark.parametrize("method", KEYS)
def test_round_trip_is_exact(method: str, full: bool, tiny: Verifier, tmp_path: Path) -> None:
    drafter, mapping = make(method, tiny, full)
    save_drafter(drafter, tmp_path / "drafter", tiny, K, mapping)
    validate_drafter(tmp_path / "drafter", tiny)
    loaded, loaded_mapping, config = load_drafter(tmp_path / "drafter")
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    assert (loaded_mapping is None) == (mapping is None)
    for name, tensor in drafter.state_dict().items():  # the verifier's own head too, where it is shared
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.embed_tokens, drafter.embed_tokens)
    assert config["speculators_model_type"] == method
    assert config.keys() >= KEYS[method]
    assert config["transformer_layer_config"]["model_type"] == ("llama" if "eagle" in method else "qwen3")
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    is_block = "eagle" not in method
    assert ("lm_head.weight" in stored) == (not is_block or (not full and method != "dflash2"))
    assert not any("embed_tokens" in name for name in stored)


@pytest.mark.parametrize(
    ("method", "key", "value", "message"),
    [
        ("peagle", "mask_token_id", None, "lacks mask_token_id"),
        ("dflash", "block_size", None, "lacks block_size"),
        ("dflash", "sliding_window_non_causal", False, "sliding_window_non_causal is false"),
        ("dspark", "markov_head_type", "gated", "'gated'; vLLM runs 'vanilla' only"),
        ("dspark", "enable_confidence_head", False, "enable_confidence_head is false"),
        ("dflash2", "selector_rank", None, "lacks selector_rank"),
        ("dflash", "aux_hidden_state_layer_ids", [2, 2], "must be different layer numbers"),
    ],
)
def test_a_wrong_key_is_named(method: str, key: str, value: Any, message: str, tiny: Verifier, tmp_path: Path) -> None:
    drafter, mapping = make(method, tiny)
    save_drafter(drafter, tmp_path / "drafter", tiny, K, mapping)
    file = tmp_path / "drafter" / "config.json"
    config = json.loads(file.read_text())
    if value is None:
        del config[key]
    else:
        config[key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        validate_drafter(tmp_path / "drafter", tiny)


def test_warm_start(tiny: Verifier, tmp_path: Path) -> None:
    """A drafter goes on from one of its own method; DSpark from DFlash, with heads of its own."""
    for method in ("eagle3", "dflash"):
        drafter, mapping = make(method, tiny)
        save_drafter(drafter, tmp_path / method, tiny, K, mapping)
    fresh, mapping = make("eagle3", tiny)
    fresh.lm_head.weight.data.zero_()
    warm_start(fresh, tmp_path / "eagle3", mapping)
    assert torch.equal(fresh.lm_head.weight, load_file(tmp_path / "eagle3" / "model.safetensors")["lm_head.weight"])
    spark, mapping = make("dspark", tiny)
    markov = spark.markov_head.markov_w1.weight.clone()
    spark.fc.weight.data.zero_()
    warm_start(spark, tmp_path / "dflash", mapping)
    assert torch.equal(spark.fc.weight, load_file(tmp_path / "dflash" / "model.safetensors")["fc.weight"])
    assert torch.equal(spark.markov_head.markov_w1.weight, markov)
    with pytest.raises(CheckpointError, match="It must be of the same method"):
        warm_start(fresh, tmp_path / "dflash", mapping)
    with pytest.raises(CheckpointError, match="another draft vocabulary"):
        warm_start(fresh, tmp_path / "eagle3", None)
    assert fresh.config.vocab_size == VOCAB
