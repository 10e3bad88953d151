"""P-EAGLE against a slow computation written from the method's definition alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speculators.config import TrainConfig
from speculators.models.peagle import PEagleConfig, PEagleDrafter, PEagleObjective
from speculators.models.verifier_head import VerifierHead
from tests.models.test_eagle3 import CONFIG, HIDDEN, KEPT, VOCAB, document, pack, slow_norm, slow_rope

DEPTHS, MASK = 3, 7
SHAPE = {key: value for key, value in CONFIG.__dict__.items() if key != "norm_before_residual"}
PEAGLE = PEagleConfig(**{**SHAPE, "num_layers": 2}, mask_token_id=MASK, depths=DEPTHS)
LENGTHS = [9, 5, 12, 3, 7]


def make(config: PEagleConfig = PEAGLE) -> tuple[PEagleDrafter, VerifierHead, PEagleObjective]:
    torch.manual_seed(0)
    drafter = PEagleDrafter(config).double()
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    drafter.embed_tokens.normal_()
    head = VerifierHead(
        drafter.embed_tokens.clone(),
        torch.randn(16, HIDDEN, dtype=torch.float64),
        torch.rand(HIDDEN, dtype=torch.float64) + 0.5,
        1e-5,
    )
    objective = drafter.objective(head, KEPT, TrainConfig())
    assert isinstance(objective, PEagleObjective)
    return drafter, head, objective


def slow_hidden(drafter: PEagleDrafter, tokens: list[int], states: Tensor) -> dict[tuple[int, int], Tensor]:
    """Hidden state before lm_head of every (position, depth), as one long sequence of independent rollouts."""
    w = {name: value.detach() for name, value in drafter.state_dict().items()}
    length, dim = len(tokens), 8
    x: dict[tuple[int, int], Tensor] = {}
    embedded: dict[tuple[int, int], Tensor] = {}
    for t in range(length):
        for d in range(DEPTHS):
            source = states[t].reshape(-1) if d == 0 else w["mask_hidden"].reshape(-1)
            x[t, d] = w["fc.weight"] @ source
            following = tokens[t + 1] if t + 1 < length else 0
            embedded[t, d] = drafter.embed_tokens[following if d == 0 else MASK]
    for layer in range(drafter.config.num_layers):
        at = f"layers.{layer}."
        queries, keys, values = {}, {}, {}
        for (t, d), feature in x.items():
            if layer == 0:
                parts = [
                    slow_norm(embedded[t, d], w[at + "input_layernorm.weight"]),
                    slow_norm(feature, w[at + "hidden_norm.weight"]),
                ]
                inputs = torch.cat(parts)
            else:
                inputs = slow_norm(feature, w[at + "input_layernorm.weight"])
            q, k, v = (w[f"{at}self_attn.{name}_proj.weight"] @ inputs for name in "qkv")
            queries[t, d] = [slow_rope(part, t + d) for part in q.split(dim)]
            keys[t, d] = [slow_rope(part, t + d) for part in k.split(dim)]
            values[t, d] = list(v.split(dim))
        after = {}
        for (t, d), feature in x.items():
            seen = [(s, 0) for s in range(t + 1)] + [(t, j) for j in range(1, d + 1)]
            mixed = []
            for h in range(4):
                scores = [math.exp(float(queries[t, d][h] @ keys[at_][h // 2]) / math.sqrt(dim)) for at_ in seen]
                mixed.append(sum(s / sum(scores) * values[at_][h // 2] for s, at_ in zip(scores, seen, strict=True)))
            hidden = feature + w[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
            y = slow_norm(hidden, w[at + "post_attention_layernorm.weight"])
            gate, up = w[at + "mlp.gate_proj.weight"] @ y, w[at + "mlp.up_proj.weight"] @ y
            after[t, d] = hidden + w[at + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        x = after
    return {place: slow_norm(feature, w["norm.weight"]) for place, feature in x.items()}


def slow_losses(drafter: PEagleDrafter, head: VerifierHead, doc: dict[str, Tensor]) -> list[float]:
    hidden = slow_hidden(drafter, doc["tokens"].tolist(), doc["states"][:, :3])
    sums = [0.0] * DEPTHS
    for (t, d), state in hidden.items():
        predicted = t + 2 + d
        if predicted < len(doc["tokens"]) and doc["mask"][predicted]:
            q = torch.softmax(drafter.lm_head.weight.detach() @ state, 0)
            p = torch.softmax(head.lm_head @ slow_norm(doc["states"][predicted - 1, 3], head.norm_weight), 0)
            sums[d] += float((p * torch.log(p / q)).sum())
    return sums


def test_packed_forward_is_the_definition() -> None:
    drafter, head, objective = make()
    objective.eval()  # no drafts are dropped
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    losses, _ = objective(pack([documents[:2], documents[2:4], documents[4:]], 18))
    expected = torch.tensor([slow_losses(drafter, head, doc) for doc in documents], dtype=torch.float64).sum(dim=0)
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-9, atol=1e-9)


def test_packed_equals_separate() -> None:
    drafter, _, objective = make()
    objective.eval()
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    packed_loss, packed_sums = objective(pack([documents[:3], documents[3:]], 30))
    packed_loss.sum().backward()
    gradients = [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]
    drafter.zero_grad()
    alone = [objective(pack([[doc]], len(doc["tokens"]))) for doc in documents]
    torch.stack([loss for loss, _ in alone]).sum().backward()
    torch.testing.assert_close(packed_loss, torch.stack([loss for loss, _ in alone]).sum(dim=0))
    torch.testing.assert_close(packed_sums, torch.stack([sums for _, sums in alone]).sum(dim=0))
    for packed, parameter in zip(gradients, drafter.parameters(), strict=True):
        torch.testing.assert_close(packed, parameter.grad)


def test_no_depth_sees_another_document_or_the_future() -> None:
    """With a loss at one token alone; the depths before it are the same rollout's own."""
    _, _, objective = make()
    objective.eval()
    start, at = 9, 17  # the second document begins at 9
    batch = pack([[document(9, 0), document(12, 1)]], 21)
    batch.loss_mask[:] = False
    batch.loss_mask[0, at] = True
    batch.hidden_states.requires_grad_()
    losses, _ = objective(batch)
    for depth in range(DEPTHS):
        last = at - 2 - depth
        [gradient] = torch.autograd.grad(losses[depth], batch.hidden_states, retain_graph=True)
        seen = gradient[0, :, :3].abs().sum(dim=(-1, -2)).nonzero()[:, 0].tolist()
        assert seen == list(range(start, last + 1))
        changed = (batch.token_ids + 2) % VOCAB
        changed[0, start + 1 : last + 2] = batch.token_ids[0, start + 1 : last + 2]
        again, _ = objective(replace(batch, token_ids=changed))
        torch.testing.assert_close(again[depth], losses[depth], rtol=0, atol=0)


def test_dropped_drafts_keep_the_mean() -> None:
    """Which drafts go deeper is random, and the mean loss of a depth stays what it is without dropping."""
    _, _, objective = make()
    documents = [document(24, seed) for seed in range(6)]
    means, counts = [], []
    for seed in range(40):
        # Batches of other lengths draw other numbers.
        batch = pack([documents, [document(4 + seed, 100 + seed)]], 6 * 24)
        losses, sums = objective(batch)
        again, _ = objective(batch)
        assert torch.equal(losses, again)
        means.append((losses / sums[1]).detach())
        counts.append(sums[1])
    objective.eval()
    losses, sums = objective(pack([documents], 6 * 24))
    shares = torch.stack(counts).mean(dim=0) / torch.stack(counts).mean(dim=0)[0]
    assert 0.6 < float(shares[1]) < 0.8
    assert 0.4 < float(shares[2]) < 0.6
    torch.testing.assert_close(torch.stack(means).mean(dim=0), (losses / sums[1]).detach(), rtol=0.15, atol=0.0)


@torch.no_grad()
def test_proposer_is_the_training_forward() -> None:
    drafter, _, _ = make()
    doc = document(12, 3)
    tokens, states = doc["tokens"].tolist(), doc["states"][:, :3]
    proposer, read = drafter.proposer(KEPT, DEPTHS), 0
    for end in (4, 5, 8):
        draft = proposer.propose(states[read:end], tokens[read + 1 : end + 1])
        read = end
        hidden = slow_hidden(drafter, tokens[: end + 1], states[: end + 1])
        expected = [int(KEPT[int((drafter.lm_head.weight @ hidden[end - 1, d]).argmax())]) for d in range(DEPTHS)]
        assert draft == expected


def test_a_batch_without_loss_positions_has_zero_gradients_everywhere() -> None:
    drafter, _, objective = make()
    doc = document(6, 0)
    losses, sums = objective(pack([[{**doc, "mask": torch.zeros(6, dtype=torch.bool)}]], 8))
    losses.sum().backward()
    assert not losses.any()
    assert not sums.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_config_keys_round_trip() -> None:
    keys = {**PEAGLE.own_keys(), "speculators_config": {"proposal_methods": [{"speculative_tokens": DEPTHS}]}}
    assert replace(PEAGLE, **PEagleConfig.read_own_keys(keys)) == PEAGLE
    assert PEagleConfig.read_own_keys({**keys, "mask_token_id": MASK})["norm_before_residual"] is False
    with pytest.raises(KeyError, match="mask_token_id"):
        PEagleConfig.read_own_keys({"speculators_config": keys["speculators_config"]})
    assert VOCAB > MASK
