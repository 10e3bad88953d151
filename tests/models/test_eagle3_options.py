"""Several draft layers and every norm option, per position by definition, and shapes taken from a verifier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.config import TrainConfig
from speculators.errors import CheckpointError
from speculators.models.attention import StepKeys, document_mask
from speculators.models.drafter import DraftSetting
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter
from speculators.models.verifier_head import VerifierHead
from tests.models.test_eagle3 import slow_norm, slow_rope
from tests.models.tiny import HIDDEN, VOCAB, make_drafter, write_verifier

STEPS, LENGTH = 3, 6
OPTIONS: list[dict[str, Any]] = [
    {"norm_before_residual": False},
    {"num_layers": 2},
    {"num_layers": 2, "norm_output": True, "norm_before_residual": False},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"num_layers": 2, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    {"layer_type": "qwen3"},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
]


def slow_hidden(drafter: Eagle3Drafter, tokens: list[int], states: Tensor) -> list[list[Tensor]]:
    """Hidden state before lm_head of each step and position of one document."""
    w = {name: value.detach() for name, value in drafter.state_dict().items()}
    config = drafter.config
    dim, kv_heads = config.head_dim, config.num_key_value_heads
    features = []
    for t in range(len(states)):
        x = states[t].reshape(-1)
        if config.norm_before_fc:
            x = slow_norm(x, w["input_norm.weight"])
        if config.fc_norm:
            x = torch.cat([slow_norm(x[i * HIDDEN : (i + 1) * HIDDEN], w[f"fc_norm.{i}.weight"]) for i in range(3)])
        features.append(w["fc.weight"] @ x)
    seen: list[list[list[tuple[list[Tensor], list[Tensor]]]]] = [[] for _ in range(config.num_layers)]
    outputs = []
    for k in range(STEPS):
        for layer in range(config.num_layers):
            at = f"layers.{layer}."
            rows, queries, residuals = [], [], []
            for t, feature in enumerate(features):
                if layer == 0:
                    token = tokens[t + 1 + k] if t + 1 + k < len(tokens) else 0
                    normed = slow_norm(feature, w[at + "hidden_norm.weight"])
                    x = torch.cat([slow_norm(drafter.embed_tokens[token], w[at + "input_layernorm.weight"]), normed])
                    residuals.append(normed if config.norm_before_residual else feature)
                else:
                    x = slow_norm(feature, w[at + "input_layernorm.weight"])
                    residuals.append(feature)
                q, key, value = (w[f"{at}self_attn.{name}_proj.weight"] @ x for name in "qkv")
                normed_heads = []
                for name, vector in (("q", q), ("k", key)):
                    parts = list(vector.split(dim))
                    if config.layer_type == "qwen3":
                        parts = [slow_norm(part, w[f"{at}self_attn.{name}_norm.weight"]) for part in parts]
                    normed_heads.append([slow_rope(part, t + k) for part in parts])
                queries.append(normed_heads[0])
                rows.append((normed_heads[1], list(value.split(dim))))
            seen[layer].append(rows)
            following = []
            for t in range(len(features)):
                visible = [seen[layer][0][s] for s in range(t + 1)] + [seen[layer][j][t] for j in range(1, k + 1)]
                mixed = []
                for h, query in enumerate(queries[t]):
                    group = h * kv_heads // config.num_attention_heads
                    weights = [math.exp(float(query @ keys[group]) / math.sqrt(dim)) for keys, _ in visible]
                    parts = [weight * values[group] for weight, (_, values) in zip(weights, visible, strict=True)]
                    mixed.append(sum(parts[1:], parts[0]) / sum(weights))
                hidden = residuals[t] + w[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
                y = slow_norm(hidden, w[at + "post_attention_layernorm.weight"])
                gate, up = w[at + "mlp.gate_proj.weight"] @ y, w[at + "mlp.up_proj.weight"] @ y
                following.append(hidden + w[at + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
            features = following
        hiddens = [slow_norm(feature, w["norm.weight"]) for feature in features]
        outputs.append(hiddens)
        if config.norm_output:
            features = hiddens
    return outputs


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_steps_and_decoding_are_the_definition(options: dict[str, Any]) -> None:
    drafter = make_drafter(**options).double()
    drafter.embed_tokens.normal_()
    tokens, states = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, 3, HIDDEN, dtype=torch.float64)
    expected = slow_hidden(drafter, tokens.tolist(), states)
    with torch.no_grad():
        fused = features = drafter.fuse(states.flatten(1))[None]
        mask, past = document_mask(torch.zeros(1, LENGTH)), [StepKeys() for _ in drafter.layers]
        for k in range(STEPS):
            shifted = torch.cat([tokens[1 + k :], torch.zeros(1 + k, dtype=torch.long)])[None]
            hidden, features = drafter.step(features, shifted, torch.arange(LENGTH)[None] + k, past, mask)
            torch.testing.assert_close(hidden[0], torch.stack(expected[k]), rtol=1e-9, atol=1e-9)
        start = LENGTH - STEPS
        cache = drafter.new_cache()
        hidden, last = drafter.decode(
            fused[:, : start + 1], tokens[None, 1 : start + 2], torch.arange(start + 1)[None], cache
        )
        torch.testing.assert_close(hidden[0, -1], expected[0][start], rtol=1e-9, atol=1e-9)
        hidden, _ = drafter.decode(last[:, -1:], tokens[None, start + 2, None], torch.tensor([[start + 1]]), cache)
        torch.testing.assert_close(hidden[0, -1], expected[1][start], rtol=1e-9, atol=1e-9)


def test_a_fresh_drafter_passes_features_through(tmp_path: Path) -> None:
    """At the start a drafter says what the verifier's head says of the last auxiliary layer."""
    verifier = write_verifier(tmp_path / "v")
    kept = torch.arange(16) * 2 + 1
    head = VerifierHead.load(verifier, kept)
    config = Eagle3Config.for_verifier(verifier, DraftSetting(TrainConfig(), [2, 4, 5], 16, 3, 0))
    drafter = Eagle3Drafter(config)
    drafter.initialise(head)
    assert not drafter.embed_tokens.requires_grad
    assert "embed_tokens" not in drafter.state_dict()
    states = torch.randn(1, 5, 3, HIDDEN)
    past = [StepKeys()]
    hidden, _ = drafter.step(
        drafter.fuse(states.flatten(2)),
        torch.zeros(1, 5, dtype=torch.long),
        torch.arange(5)[None],
        past,
        document_mask(torch.zeros(1, 5)),
    )
    torch.testing.assert_close(drafter.lm_head(hidden)[0], head.logits(states[0, :, -1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 36}),
        ({"head_dim": None, "num_key_value_heads": None}, {"head_dim": 6, "num_key_value_heads": 4}),
        ({"intermediate_size": None, "moe_intermediate_size": 7}, {"intermediate_size": 4 * HIDDEN}),
        ({"intermediate_size": [30, 50]}, {"intermediate_size": 50}),
        ({"rms_norm_eps": None}, {"rms_norm_eps": 1e-6}),
    ],
)
def test_shape_from_the_verifier(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "v", **changes)
    config = Eagle3Config.for_verifier(verifier, DraftSetting(TrainConfig(num_layers=2), [2, 4, 5], 16, 3, 0))
    assert (config.num_layers, config.vocab_size, config.draft_vocab_size) == (2, VOCAB, 16)
    assert {key: getattr(config, key) for key in expected} == expected


def test_impossible_heads_are_refused(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "v", num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="4 attention heads of size 8 with 3 key-value heads"):
        Eagle3Config.for_verifier(verifier, DraftSetting(TrainConfig(), [2, 4, 5], 16, 3, 0))
