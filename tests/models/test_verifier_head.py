"""The verifier's head against transformers' own models, and checkpoints that it cannot be read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from speculators.errors import CheckpointError
from speculators.models.verifier_head import VerifierHead
from speculators.verifier import read_verifier
from tests.models.tiny import HIDDEN, VOCAB, head_tensors, write_verifier

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "pad_token_id": 0,
}
# One family for each way of ending: plain, tied, a cap and shifted norm, layer norm and factor, a divisor, biases.
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama", "rms_norm_eps": 0.1},
    {"model_type": "qwen3", "tie_word_embeddings": True},
    {"model_type": "gemma2", "final_logit_softcapping": 2.0},
    {"model_type": "cohere", "logit_scale": 0.25, "layer_norm_eps": 0.1},
    {"model_type": "granite", "logits_scaling": 4.0},
    {"model_type": "starcoder2", "norm_epsilon": 0.1, "tie_word_embeddings": False},
    {"model_type": "qwen3_next", "layer_types": ["full_attention"], "num_experts": 2, "num_experts_per_tok": 1},
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model_type"])
def test_logits_are_the_models_own(family: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE, **family)).eval()
    norm = model.model.norm
    norm.weight.data.normal_(std=0.5)
    if getattr(norm, "bias", None) is not None:
        norm.bias.data.normal_()
    model.lm_head.weight.data.normal_()
    model.save_pretrained(tmp_path / "verifier")
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(torch.randint(VOCAB, (1, 9))).logits[0]

    verifier = read_verifier(tmp_path / "verifier", "tiny", None, tmp_path / "cache")
    kept = torch.tensor([1, 5, 30])
    torch.testing.assert_close(VerifierHead.load(verifier, None).logits(seen[0][0]), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        VerifierHead.load(verifier, kept).logits(seen[0][0]), logits[:, kept], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_names_inside_larger_models_and_shards(prefix: str, tmp_path: Path) -> None:
    tensors = head_tensors()
    named = {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}
    write_verifier(tmp_path / "v", {"unrelated": torch.zeros(1)})
    (tmp_path / "v" / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(named.items()):
        save_file({name: tensor}, tmp_path / "v" / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, name in enumerate(named)}
    # A shard that no needed tensor lies in is never opened.
    index["vision.weight"] = "model-9.safetensors"
    (tmp_path / "v" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    head = VerifierHead.load(read_verifier(tmp_path / "v", "v", None, tmp_path / "cache"), torch.tensor([3, 7]))
    assert torch.equal(head.embed_tokens, tensors["model.embed_tokens.weight"])
    assert torch.equal(head.lm_head, tensors["lm_head.weight"][[3, 7]])
    assert torch.equal(head.norm_weight, tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("tied", "stored", "expected"),
    [
        (True, False, "model.embed_tokens.weight"),
        (True, True, "model.embed_tokens.weight"),  # as vLLM and transformers: a stored lm_head is ignored
        (None, False, "model.embed_tokens.weight"),
        (None, True, "lm_head.weight"),
        (False, True, "lm_head.weight"),
    ],
)
def test_tied_or_not(tied: bool | None, stored: bool, expected: str, tmp_path: Path) -> None:
    tensors = head_tensors()
    kept = tensors if stored else {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    verifier = write_verifier(tmp_path / "v", kept, tie_word_embeddings=tied)
    assert torch.equal(VerifierHead.load(verifier, None).lm_head, tensors[expected])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    tensors = head_tensors()
    quantised = {**tensors, "lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)}
    padded = {**tensors, "model.embed_tokens.weight": torch.zeros(VOCAB + 8, HIDDEN)}
    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (tensors, {"model_type": "brand_new"}, "model_type 'brand_new' is not known"),
        (quantised, {}, "lm_head.weight is torch.int8"),
        (padded, {}, r"embed_tokens.weight is torch.float32 \[48, 24\].*\[40, 24\]"),
        (headless, {}, "no tensor named lm_head.weight"),
        ({"x": torch.zeros(1)}, {}, "no tensor named model.embed_tokens.weight"),
    ]
    for number, (written, changes, message) in enumerate(cases):
        verifier = write_verifier(tmp_path / str(number), written, **changes)
        with pytest.raises(CheckpointError, match=message):
            VerifierHead.load(verifier, None)
    verifier = write_verifier(tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged"):
        VerifierHead.load(verifier, None)
