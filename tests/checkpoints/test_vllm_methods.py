"""Every method's drafter, trained for a moment on three answers, drafts in real vLLM what our own decoding drafts; and
what research code stores drafts the same after conversion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.checkpoints.convert import convert, convert_back
from speculators.checkpoints.research_formats import Layout
from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.config import ServingConfig, TrainConfig
from speculators.data.vocabulary import VocabMapping
from speculators.evaluation.reference import reference_decode
from speculators.models.batch import PackedBatch
from speculators.models.drafter import Drafter, DraftSetting
from speculators.models.methods import METHODS
from speculators.models.verifier_head import VerifierHead
from speculators.serving.vllm_server import triton_interpreter
from speculators.verifier import Verifier
from tests.checkpoints.test_vllm_loads import GENERATE, run_in_vllm

pytestmark = pytest.mark.vllm

TEXTS = ["The cat sat on the mat. The cat sat on the", "1, 2, 3, 4, 5, 6, 7,", "def add(a, b):\n    return"]
LAYERS, K, ANSWER, MOST_STEPS = [2, 15, 27], 3, 48, 300
INTERPRETED = ("dflash2", "dspark")  # a few tokens a second
Answers = list[tuple[list[int], PackedBatch]]


@pytest.fixture(scope="module")
def model(verifier: Verifier) -> Any:
    return AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(verifier: Verifier, model: Any) -> Answers:
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


def overfit(
    method: str, verifier: Verifier, answers: Answers, reduced: bool = True, **changes: Any
) -> tuple[Drafter, VocabMapping | None]:
    """A drafter that knows the three answers; ``changes`` to its configuration."""
    kind = METHODS[method]
    kept, mapping = None, None
    if reduced and not kind.drafter.full_vocabulary:
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
    drafter = kind.drafter(replace(kind.config.for_verifier(verifier, setting), **changes))
    drafter.initialise(head)
    objective = drafter.objective(head, kept, train)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(MOST_STEPS):
        results = [objective(batch) for _, batch in answers]
        _, counted, right, _, _ = sum(counts for _, counts in results)
        if (right > 0.95 * counted).all():
            return drafter, mapping
        optimizer.zero_grad()
        sum(losses.sum() for losses, _ in results).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    pytest.fail(f"{method} has not learned three answers in {MOST_STEPS} steps: {right / counted}")


def draft_in_vllm(
    folder: Path, answers: Answers, length: int, extra: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """What vLLM answers to the prompts, and its counters; ``more`` goes into the request."""
    request, answer = folder.parent / f"{folder.name}-request.json", folder.parent / f"{folder.name}-answer.json"
    request.write_text(json.dumps({"prompts": [prompt for prompt, _ in answers], "max_tokens": length, **more}))
    run_in_vllm(GENERATE, more.get("verifier", folder), request, answer, extra=extra)
    return json.loads(answer.read_text())


@pytest.mark.parametrize("method", [method for method in METHODS if method != "mtp"])
def test_vllm_drafts_what_we_draft(
    method: str, verifier: Verifier, model: Any, answers: Answers, tmp_path: Path
) -> None:
    drafter, mapping = overfit(method, verifier, answers)
    folder, length = tmp_path / "drafter", 12 if method in INTERPRETED else ANSWER
    save_drafter(drafter, folder, verifier, K, mapping)
    validate_drafter(folder, verifier)
    loaded, loaded_mapping, _ = load_drafter(folder)
    assert (loaded_mapping is None) == (mapping is None)
    extra = triton_interpreter(ServingConfig()) if method in INTERPRETED else None
    answer = draft_in_vllm(folder, answers, length, extra)

    loaded.eval()
    kept = None if loaded_mapping is None else loaded_mapping.kept_ids
    ours = [reference_decode(model, loaded.proposer(kept, K), LAYERS, prompt, K, length, ()) for prompt, _ in answers]
    assert answer["token_ids"] == [result.token_ids for result in ours]
    counts = answer["counts"]
    assert counts["vllm:spec_decode_num_drafts"] == sum(result.drafts for result in ours)
    per_position = [sum(result.accepted_per_position[k] for result in ours) for k in range(K)]
    assert counts["vllm:spec_decode_num_accepted_tokens_per_pos"] == per_position
    # Right often at every position, so a wrong shift, mask, norm or position would show.
    assert all(accepted > 0.2 * counts["vllm:spec_decode_num_drafts"] for accepted in per_position)


@pytest.mark.parametrize(("method", "layout"), [("eagle3", "safeailab"), ("dflash", "z-lab")])
def test_a_converted_drafter_drafts_as_the_original(
    method: str, layout: Layout, verifier: Verifier, answers: Answers, tmp_path: Path
) -> None:
    """The original is what research code stores, served as vLLM serves such folders."""
    options: dict[str, Any] = {"norm_before_residual": False, "num_layers": 1} if method == "eagle3" else {}
    drafter, mapping = overfit(method, verifier, answers, reduced=method == "eagle3", **options)
    save_drafter(drafter, tmp_path / "ours", verifier, K, mapping)
    research = tmp_path / "research"
    convert_back(tmp_path / "ours", research, layout)
    if layout == "safeailab":  # whose checkpoints name no layers; vLLM's default is SafeAILab's
        config = json.loads((research / "config.json").read_text())
        del config["eagle_config"]
        (research / "config.json").write_text(json.dumps(config))
    convert(research, tmp_path / "converted", verifier, K)
    speculative = {"method": method, "model": str(research), "num_speculative_tokens": K}
    original = draft_in_vllm(research, answers, ANSWER, verifier=str(verifier.path), speculative_config=speculative)
    converted = draft_in_vllm(tmp_path / "converted", answers, ANSWER)
    assert converted == original
    accepted = converted["counts"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert all(count > 0.2 * converted["counts"]["vllm:spec_decode_num_drafts"] for count in accepted)
