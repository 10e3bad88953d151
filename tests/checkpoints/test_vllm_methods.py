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

from infra.demo import mimo
from speculators.checkpoints.convert import convert, convert_back
from speculators.checkpoints.research_formats import Layout
from speculators.checkpoints.servable import servable
from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.checkpoints.stitch import read_mtp_head
from speculators.config import ServingConfig, TrainConfig
from speculators.data.vocabulary import VocabMapping
from speculators.evaluation.reference import reference_decode
from speculators.models.batch import PackedBatch
from speculators.models.drafter import Choice, Drafter, DraftSetting, Objective
from speculators.models.methods import METHODS
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.verifier_head import VerifierHead
from speculators.serving.vllm_server import triton_interpreter
from speculators.verifier import Verifier, read_verifier
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
    train_on(drafter, drafter.objective(head, kept, train), answers)
    return drafter, mapping


def train_on(drafter: Drafter, objective: Objective, answers: Answers) -> None:
    """Until nearly everything is right at every position, so that no near-tie decides what is drafted."""
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(MOST_STEPS):
        results = [objective(batch) for _, batch in answers]
        _, counted, right, _, _ = sum(counts for _, counts in results)
        if (right > 0.95 * counted).all():
            return
        optimizer.zero_grad()
        sum(losses.sum() for losses, _ in results).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    pytest.fail(f"It has not learned three answers in {MOST_STEPS} steps: {right / counted}")


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

    kept = None if loaded_mapping is None else loaded_mapping.kept_ids
    compare(answer, loaded, kept, model, answers, length)


def compare(
    answer: dict[str, Any], drafter: Drafter, kept: torch.Tensor | None, model: Any, answers: Answers, length: int
) -> None:
    """vLLM's answer and counters are those of our own decoding.

    A token that the drafter hardly prefers to another may be another in vLLM, whose sums go in another order: each
    allows for a draft more or less, and one in place of another.
    """
    drafter.eval()
    choice = CountingChoice()
    layers, proposers = drafter.state_layer_ids, [drafter.proposer(kept, K, choice) for _ in answers]
    ours = [
        reference_decode(model, proposer, layers, prompt, K, length, ())
        for proposer, (prompt, _) in zip(proposers, answers, strict=True)
    ]
    assert answer["token_ids"] == [result.token_ids for result in ours]
    drafts = answer["counts"]["vllm:spec_decode_num_drafts"]
    accepted = answer["counts"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert choice.near_ties < 0.05 * K * drafts
    assert abs(drafts - sum(result.drafts for result in ours)) <= choice.near_ties
    for k in range(K):
        expected = sum(result.accepted_per_position[k] for result in ours)
        assert abs(accepted[k] - expected) <= 2 * choice.near_ties
        # Right often at every position, so a wrong shift, mask, norm or position would show.
        assert accepted[k] > 0.2 * drafts


class CountingChoice(Choice):
    """The best token, and how often the second best was as good within what float32 can tell."""

    near_ties = 0

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> int:
        best = logits.topk(2).values
        self.near_ties += int(best[0] - best[1] < 0.02)
        return super().__call__(logits, ids)


def test_vllm_drafts_with_a_stitched_head(verifier: Verifier, model: Any, answers: Answers, tmp_path: Path) -> None:
    """MTP: the head of a MiMo that answers as the verifier does, trained, and served from a stitched checkpoint."""
    mimo.build(tmp_path / "mimo", verifier, steps=1)
    native = read_verifier(tmp_path / "mimo", str(tmp_path / "mimo"), None, tmp_path / "cache")
    head = VerifierHead.load(native, None)
    drafter = MtpDrafter(MtpConfig.for_folder(native.path))
    drafter.initialise(head)
    drafter.load_head(read_mtp_head(native.path).tensors)
    objective = drafter.objective(head, None, TrainConfig(method="mtp", ttt_steps=K))
    last = [(prompt, replace(batch, hidden_states=batch.hidden_states[:, :, -1:])) for prompt, batch in answers]
    train_on(drafter, objective, last)
    save_drafter(drafter, tmp_path / "drafter", native, K, None)
    validate_drafter(tmp_path / "drafter", native)
    served = servable(tmp_path / "drafter", native, tmp_path / "cache")
    speculative = json.loads(served.arguments[1])
    answer = draft_in_vllm(
        tmp_path / "drafter", answers, ANSWER, verifier=str(served.model), speculative_config=speculative
    )
    loaded, _, _ = load_drafter(tmp_path / "drafter")
    compare(answer, loaded, None, model, answers, ANSWER)


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
