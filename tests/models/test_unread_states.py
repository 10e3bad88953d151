"""No method reads the hidden states that are not stored: other values there change neither losses nor gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speculators.config import TrainConfig
from speculators.models.batch import PackedBatch
from speculators.models.drafter import DraftSetting, Objective
from speculators.models.methods import METHODS
from speculators.models.verifier_head import VerifierHead
from tests.models.test_eagle3 import document, pack
from tests.models.test_mtp import make as make_mtp
from tests.models.tiny import write_verifier

ROWS = [[9, 5, 12, 3], [7, 20]]


def objective(name: str, folder: Path) -> Objective:
    if name == "mtp":
        return make_mtp("mimo", folder)[2]
    verifier, train = write_verifier(folder / "verifier"), TrainConfig(method=name, ttt_steps=3)  # type: ignore[arg-type]
    method = METHODS[name]
    setting = DraftSetting(train, [2, 4, 5], verifier.vocab_size, num_speculative_tokens=3, mask_token_id=1)
    torch.manual_seed(0)
    drafter = method.drafter(method.config.for_verifier(verifier, setting)).double()
    head = VerifierHead.load(verifier, None, torch.float64)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    drafter.embed_tokens = head.embed_tokens
    return drafter.objective(head, None, train)


def results(objective: Objective, batch: PackedBatch) -> list[torch.Tensor]:
    objective.zero_grad()
    losses, sums = objective(batch)
    losses.sum().backward()
    return [losses.detach(), sums, *(p.grad.clone() for p in objective.parameters() if p.grad is not None)]


def stored(batch: PackedBatch, reads_last: bool) -> torch.Tensor:
    """bool [B, S, n_layers]: what extraction keeps of a batch."""
    ends = torch.ones_like(batch.document_ids, dtype=torch.bool)
    ends[:, :-1] = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    kept = ((batch.document_ids >= 0) & ~ends)[..., None].repeat(1, 1, batch.hidden_states.shape[2])
    if not reads_last:
        # The row that predicts a document's first token with a loss, and all after it.
        following = torch.zeros_like(batch.loss_mask)
        following[:, :-1] = batch.loss_mask[:, 1:]
        kept[..., -1] &= following
    return kept


@pytest.mark.parametrize("name", list(METHODS))
def test_states_that_are_not_stored_are_not_read(name: str, tmp_path: Path) -> None:
    batch = pack([[document(length, length) for length in lengths] for lengths in ROWS], 32)
    if name == "mtp":
        batch = replace(batch, hidden_states=batch.hidden_states[:, :, -1:])
    trained = objective(name, tmp_path)
    kept = stored(batch, reads_last=name == "mtp")
    assert 0 < int(kept[..., -1].sum()) < int((batch.document_ids >= 0).sum())
    expected = results(trained, batch)
    assert float(expected[0].abs().sum()) > 0
    for fill in (0.0, 1e3):
        changed = batch.hidden_states.masked_fill(~kept[..., None], fill)
        for mine, other in zip(results(trained, replace(batch, hidden_states=changed)), expected, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_the_states_that_are_stored_are_needed(name: str, tmp_path: Path) -> None:
    """At both ends of what is kept of the last layer, another value changes the losses."""
    batch = pack([[document(20, 1)]], 20)
    trained = objective(name, tmp_path).eval()
    expected = results(trained, batch)[0]
    kept = stored(batch, reads_last=False)[0, :, -1].nonzero()[:, 0]
    for position in (int(kept[0]), int(kept[-1])):
        changed = batch.hidden_states.clone()
        changed[0, position, -1] += 1
        assert not torch.equal(results(trained, replace(batch, hidden_states=changed))[0], expected), position
