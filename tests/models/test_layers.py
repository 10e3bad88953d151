"""RoPE against transformers, and what a drafter takes over of its verifier's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculators.models.layers import RotaryEmbedding, draft_rope_parameters, rope_parameters

HEAD_DIM = 64
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "truncate": False,
    },
]


@pytest.mark.parametrize("parameters", ROPES[1:], ids=lambda p: p["rope_type"])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = int(parameters["factor"] * parameters.get("original_max_position_embeddings", 512))
    config = LlamaConfig(
        hidden_size=HEAD_DIM, num_attention_heads=1, max_position_embeddings=length, rope_parameters=dict(parameters)
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rotary = RotaryEmbedding(HEAD_DIM, parameters)
    torch.testing.assert_close(rotary.frequencies.float(), frequencies, rtol=1e-5, atol=0)
    assert rotary.scaling == pytest.approx(scaling)


def test_casting_does_not_round_the_frequencies() -> None:
    rotary = RotaryEmbedding(HEAD_DIM, ROPES[0])
    positions = torch.arange(1000)[None]
    before = rotary(positions, torch.float64)
    after = rotary.to(torch.bfloat16)(positions, torch.float64)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, "'longrope' is not supported"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "lacks 'factor'"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "unknown key 'partial_rotary_"),
    ],
)
def test_unusable_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(HEAD_DIM, parameters)


def test_both_forms_of_config_mean_the_same() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_parameters(new) == rope_parameters(old)
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("parameters", ROPES, ids=lambda p: p["rope_type"])
def test_drafter_takes_over_what_it_can(parameters: dict[str, Any]) -> None:
    assert draft_rope_parameters({"rope_parameters": parameters}) == parameters


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 2]}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, {"rope_theta": 1e6}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 3.0},
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {"rope_theta": 1e4}),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0},
            },
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
    ],
)
def test_drafter_leaves_out_what_is_the_verifiers_alone(config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = draft_rope_parameters(config)
    assert found == {"rope_type": "default", **expected}
    RotaryEmbedding(HEAD_DIM, found)
