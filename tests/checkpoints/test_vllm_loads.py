"""Drafters in vLLM itself: its own loader reads config.json, and it generates with one from its folder alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.config import ServingConfig, TrainConfig
from speculators.data.vocabulary import VocabMapping
from speculators.evaluation.reference import reference_decode
from speculators.models.drafter import DraftSetting
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter
from speculators.models.layers import RotaryEmbedding
from speculators.models.verifier_head import VerifierHead
from speculators.serving.vllm_server import serving_python
from speculators.verifier import Verifier
from tests.models.test_layers import HEAD_DIM, ROPES
from tests.models.tiny import make_drafter, make_mapping, write_verifier

pytestmark = pytest.mark.vllm

READ_CONFIGS = """
import json, sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig as _

found = []
for folder in sys.argv[2:]:
    values, _unused = SpeculatorsConfig.get_config_dict(folder)
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(dict(values))
    config = get_config(folder, trust_remote_code=False)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, config.max_position_embeddings, rope_parameters=config.rope_parameters, dtype=torch.float32)
    found.append({
        "speculative": speculative,
        "config": {key: getattr(config, key) for key in (
            "architectures", "hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "draft_vocab_size",
            "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids",
            "target_hidden_size")},
        "rope": rope.cos_sin_cache[:50].tolist(),
    })
open(sys.argv[1], "w").write(json.dumps(found))
"""

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

folder, request, answer = sys.argv[1:]
asked = json.load(open(request))
llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, disable_log_stats=False,
          generation_config="vllm", enable_prefix_caching=False, speculative_config=asked.get("speculative_config"))
prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True))
counts = {}
for metric in llm.get_metrics():
    if metric.name.startswith("vllm:spec_decode"):
        counts[metric.name] = getattr(metric, "value", None) or getattr(metric, "values", None)
json.dump({"token_ids": [list(o.outputs[0].token_ids) for o in outputs], "counts": counts}, open(answer, "w"))
"""


def run_in_vllm(script: str, *arguments: Path | str, extra: Mapping[str, str] | None = None) -> None:
    """Run a script in the serving environment, with extra environment variables."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **(extra or {}),
    }
    command = [str(serving_python(ServingConfig())), "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


def test_vllm_reads_our_config(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    options: list[dict[str, Any]] = [{"rope_parameters": rope} for rope in ROPES]
    options[1] |= {"num_layers": 2, "norm_before_residual": False, "norm_before_fc": True}
    options[2] |= {"fc_norm": True, "norm_output": True}
    folders = []
    for number, changes in enumerate(options):
        # Small heads but for RoPE's sake.
        drafter = make_drafter(**changes, head_dim=HEAD_DIM, max_position_embeddings=4096)
        folders.append(tmp_path / f"drafter-{number}")
        save_drafter(drafter, folders[-1], verifier, 5, make_mapping())
    run_in_vllm(READ_CONFIGS, tmp_path / "found.json", *folders)
    for folder, found in zip(folders, json.loads((tmp_path / "found.json").read_text()), strict=True):
        drafter, _, _ = load_drafter(folder)
        shape = drafter.config
        assert found["speculative"] == {"method": "eagle3", "num_speculative_tokens": 5}
        assert found["config"] == {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.num_layers,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": shape.draft_vocab_size,
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": shape.norm_before_fc,
            "fc_norm": shape.fc_norm,
            "norm_output": shape.norm_output,
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layer_ids),
            "target_hidden_size": shape.target_hidden_size,
        }
        cos, sin = RotaryEmbedding(HEAD_DIM, shape.rope_parameters)(torch.arange(50), torch.float32)
        half = HEAD_DIM // 2
        ours = torch.cat([cos[:, 0, :half], sin[:, 0, :half]], dim=-1)
        torch.testing.assert_close(ours, torch.tensor(found["rope"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "num_layers": 2,
            "norm_before_residual": False,
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
    ids=["default", "every-option"],
)
def test_vllm_generates_with_it(options: dict[str, Any], verifier: Verifier, tmp_path: Path) -> None:
    """An untrained drafter, found by its folder alone, gets the acceptance that our own decoding gives it.

    Its draft vocabulary is small and its layers are disturbed at random, so a wrong shift, mapping, norm or position
    changes the counts.
    """
    from dataclasses import replace

    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    texts = ["The cat sat on the mat. The cat sat on the", "1, 2, 3, 4, 5, 6, 7,", "def add(a, b):\n    return"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    kept = torch.arange(2048)
    t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    mapping = VocabMapping(t2d, kept - torch.arange(len(kept)))
    shape = Eagle3Config.for_verifier(verifier, DraftSetting(TrainConfig(), [2, 15, 29], len(kept), 3, 0))
    drafter = Eagle3Drafter(replace(shape, **options))
    drafter.initialise(VerifierHead.load(verifier, kept))
    for layer in drafter.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02)
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.02)
    folder = tmp_path / "drafter"
    save_drafter(drafter, folder, verifier, 3, mapping)
    validate_drafter(folder, verifier)

    (tmp_path / "request.json").write_text(json.dumps({"prompts": prompts, "max_tokens": 48}))
    run_in_vllm(GENERATE, folder, tmp_path / "request.json", tmp_path / "answer.json")
    answer = json.loads((tmp_path / "answer.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()
    drafter.eval()
    ours = [
        reference_decode(model, drafter.proposer(mapping.kept_ids, 3), drafter.config.aux_layer_ids, prompt, 3, 48, ())
        for prompt in prompts
    ]
    assert answer["token_ids"] == [result.token_ids for result in ours]
    counts = answer["counts"]
    assert counts["vllm:spec_decode_num_drafts"] == sum(result.drafts for result in ours)
    per_position = [sum(result.accepted_per_position[k] for result in ours) for k in range(3)]
    assert counts["vllm:spec_decode_num_accepted_tokens_per_pos"] == per_position
    assert sum(per_position) > 0
