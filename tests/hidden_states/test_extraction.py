"""What vLLM extracts is what transformers computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from speculators import stages
from speculators.data.prepare import load_samples
from speculators.hidden_states.reader import HiddenStateReader

pytestmark = pytest.mark.vllm


def test_extracted_states_are_those_of_transformers(small_retraining: stages.Retraining) -> None:
    """Every layer of samples of all lengths, in float32; multi-turn samples share long prefixes."""
    run = small_retraining
    reader = HiddenStateReader.open(run.store, run.plan.extract)
    samples = load_samples(run.store, run.plan.prepare, ["train", "validation"])
    assert set(reader.sample_ids) == {sample.sample_id for sample in samples}
    by_length = sorted(samples, key=lambda sample: len(sample.token_ids))
    later_turns = [sample for sample in samples if not sample.sample_id.endswith("/0")]
    chosen = [*by_length[:3], *by_length[-3:], *later_turns[:2]]
    assert later_turns
    layers = run.verifier.num_layers
    assert reader.layer_ids == [2, layers // 2, layers - 3, layers]

    model = AutoModelForCausalLM.from_pretrained(run.verifier.path, dtype=torch.float32).eval()
    for sample in chosen:
        reader.check_tokens(sample.sample_id, sample.token_ids.tolist())
        found = reader.read(sample.sample_id)
        assert found.dtype == torch.float32
        assert found.shape == (len(sample.token_ids) - 1, 4, run.verifier.hidden_size)
        first = sample.prompt_length - 1
        assert not found[:first, -1].any(), "the last layer is stored where no method needs it"
        with torch.no_grad():
            outputs = model(torch.from_numpy(sample.token_ids[:-1]).long()[None], output_hidden_states=True)
            # transformers' last entry is after the final norm, vLLM's before it.
            last = model.model.norm(found[:, -1])
        for index, layer in enumerate(reader.layer_ids):
            expected = outputs.hidden_states[layer][0]
            mine = last if layer == layers else found[:, index]
            if layer == layers:
                mine, expected = mine[first:], expected[first:]
            error = (mine - expected).norm() / expected.norm()
            assert error < 1e-5, f"layer {layer} of {sample.sample_id}: relative error {error:.2e}"


def test_the_last_state_predicts_what_vllm_generated(small_retraining: stages.Retraining) -> None:
    """The verifier's own head on the last state gives the next token wherever the answer was generated greedily."""
    from speculators.models.verifier_head import VerifierHead

    run = small_retraining
    reader = HiddenStateReader.open(run.store, run.plan.extract)
    head = VerifierHead.load(run.verifier, None)
    right = total = 0
    for sample in load_samples(run.store, run.plan.prepare, ["validation"]):
        best = head.logits(reader.read(sample.sample_id)[:, -1]).argmax(dim=-1)
        tokens = torch.from_numpy(sample.token_ids).long()
        generated = torch.from_numpy(sample.loss_mask)[1:]
        right += int((best == tokens[1:])[generated].sum())
        total += int(generated.sum())
    assert right / total > 0.99
