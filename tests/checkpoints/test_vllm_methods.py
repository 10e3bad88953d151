"""Every method's drafter, trained for a moment on three answers, drafts in real vLLM what our own decoding drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.config import ServingConfig, TrainConfig
from speculators.data.vocabulary import VocabMapping
from speculators.evaluation.reference import reference_decode
from speculators.models.batch import PackedBatch
from speculators.models.drafter import DraftSetting
from speculators.models.methods import METHODS
from speculators.models.verifier_head import VerifierHead
from speculators.serving.vllm_server import triton_interpreter
from speculators.verifier import Verifier
from tests.checkpoints.test_vllm_loads import GENERATE, run_in_vllm

pytestmark = pytest.mark.vllm

TEXTS = ["The cat sat on the mat. The cat sat on the", "1, 2, 3, 4, 5, 6, 7,", "def add(a, b):\n    return"]
LAYERS, K, ANSWER, STEPS = [2, 15, 27], 3, 48, 40
INTERPRETED = ("dflash2", "dspark")  # a few tokens a second


@pytest.fixture(scope="module")
def model(verifier: Verifier) -> Any:
    return AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(verifier: Verifier, model: Any) -> list[tuple[list[int], PackedBatch]]:
    """Each prompt, and the batch of one row that it makes with the verifier's greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    found = []
    for text in TEXTS:
        prompt = tokenizer(text)["input_ids"]
        with torch.no_grad():
            tokens = model.generate(
                torch.tensor([prompt]), do_sample=False, min_new_tokens=ANSWER, max_new_tokens=ANSWER, pad_token_id=0
            )
            last: list[torch.Tensor] = []
            handle = model.model.norm.register_forward_pre_hook(lambda _, args, last=last: last.append(args[0]))
            states = model(tokens, output_hidden_states=True).hidden_states
            handle.remove()
        size = tokens.shape[1]
        batch = PackedBatch(
            tokens,
            torch.stack([*(states[layer] for layer in LAYERS), last[0]], dim=2),
            (torch.arange(size) >= len(prompt))[None],
            torch.zeros(1, size, dtype=torch.long),
            torch.arange(size)[None],
        )
        found.append((prompt, batch))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_vllm_drafts_what_we_draft(
    method: str, verifier: Verifier, model: Any, answers: list[tuple[list[int], PackedBatch]], tmp_path: Path
) -> None:
    kind = METHODS[method]
    kept, mapping = None, None
    if not kind.drafter.full_vocabulary:
        t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
        t2d[:2048] = True
        for _, batch in answers:
            t2d[batch.token_ids] = True
        kept = t2d.nonzero()[:, 0]
        mapping = VocabMapping(t2d, kept - torch.arange(len(kept)))
    head = VerifierHead.load(verifier, kept)
    train = TrainConfig(method=method, num_layers=2, ttt_steps=K)  # type: ignore[arg-type]
    torch.manual_seed(0)
    mask_token = 16  # a control token that no text has
    setting = DraftSetting(train, LAYERS, len(head.lm_head), K, mask_token)
    drafter = kind.drafter(kind.config.for_verifier(verifier, setting))
    drafter.initialise(head)
    objective = drafter.objective(head, kept, train)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(objective(batch)[0].sum() for _, batch in answers).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()

    folder, length = tmp_path / "drafter", 12 if method in INTERPRETED else ANSWER
    save_drafter(drafter, folder, verifier, K, mapping)
    validate_drafter(folder, verifier)
    loaded, loaded_mapping, _ = load_drafter(folder)
    assert (loaded_mapping is None) == (mapping is None)
    prompts = [prompt for prompt, _ in answers]
    (tmp_path / "request.json").write_text(json.dumps({"prompts": prompts, "max_tokens": length}))
    extra = triton_interpreter(ServingConfig()) if method in INTERPRETED else None
    run_in_vllm(GENERATE, folder, tmp_path / "request.json", tmp_path / "answer.json", extra=extra)
    answer = json.loads((tmp_path / "answer.json").read_text())

    loaded.eval()
    ours = [reference_decode(model, loaded.proposer(kept, K), LAYERS, prompt, K, length, ()) for prompt in prompts]
    assert answer["token_ids"] == [result.token_ids for result in ours]
    counts = answer["counts"]
    assert counts["vllm:spec_decode_num_drafts"] == sum(result.drafts for result in ours)
    per_position = [sum(result.accepted_per_position[k] for result in ours) for k in range(K)]
    assert counts["vllm:spec_decode_num_accepted_tokens_per_pos"] == per_position
    # Right often at every position, so a wrong shift, mask, norm or position would show.
    assert all(accepted > 0.2 * counts["vllm:spec_decode_num_drafts"] for accepted in per_position)
