"""DFlash, DFlash2 and DSpark: training forward and proposer against slow computations written from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.config import TrainConfig
from speculators.models import attention as attention_module
from speculators.models import drafter as drafter_module
from speculators.models.blocks import BlockConfig, BlockDrafter, BlockObjective, pace
from speculators.models.dflash import DFlashConfig, DFlashDrafter
from speculators.models.dflash2 import DFlash2Config, DFlash2Drafter
from speculators.models.dspark import DSparkConfig, DSparkDrafter
from speculators.models.verifier_head import VerifierHead
from tests.models.test_eagle3 import document, pack, slow_norm, slow_rope

VOCAB, HIDDEN, MASK, TOP_K = 40, 24, 7, 4
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_layers": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 64,
    "target_hidden_size": HIDDEN,
    "aux_layer_ids": (1, 2, 3),
    "block_size": 4,
    "mask_token_id": MASK,
}
KEPT = torch.arange(0, VOCAB, 2)[:16] + 1
CONFIGS: dict[str, tuple[BlockConfig, type[BlockDrafter]]] = {
    "dflash": (DFlashConfig(**SHAPE), DFlashDrafter),
    "dflash-anchor": (DFlashConfig(**SHAPE, sample_from_anchor=True), DFlashDrafter),
    "dflash-window": (DFlashConfig(**SHAPE, sliding_window=5), DFlashDrafter),
    "dspark": (DSparkConfig(**SHAPE, sample_from_anchor=True, markov_rank=5), DSparkDrafter),
    "dspark-bonus": (DSparkConfig(**SHAPE, markov_rank=5), DSparkDrafter),
    "dflash2": (
        DFlash2Config(
            **{**SHAPE, "draft_vocab_size": VOCAB},
            conv_kernel_size=3,
            conv_group_size=8,
            selector_rank=5,
            selector_top_k=TOP_K,
        ),
        DFlash2Drafter,
    ),
}
LENGTHS = [9, 5, 12, 3, 7]


def make(name: str, **train: Any) -> tuple[BlockDrafter, VerifierHead, BlockObjective]:
    config, kind = CONFIGS[name]
    torch.manual_seed(0)
    drafter = kind(config).double()
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    drafter.embed_tokens.normal_()
    kept = None if kind.full_vocabulary else KEPT
    head = VerifierHead(
        drafter.embed_tokens.clone(),
        torch.randn(config.draft_vocab_size, HIDDEN, dtype=torch.float64),
        torch.rand(HIDDEN, dtype=torch.float64) + 0.5,
        1e-5,
    )
    objective = drafter.objective(head, kept, TrainConfig(**train))
    assert isinstance(objective, BlockObjective)
    return drafter, head, objective


# --- the slow computation: one block, one slot, one head at a time; nothing shared with the package ---


def slow_conv(w: dict[str, Tensor], name: str, inputs: list[Tensor]) -> Callable[[list[Tensor], int], list[Tensor]]:
    """Convolves a block's slots; kernels from the sublayer's inputs, both sides."""
    taps, group = 3, 8
    kernels = [(w[f"{name}.kernel_projection.weight"] @ x).view(2, taps, HIDDEN // group) for x in inputs]

    def convolve(slots: list[Tensor], side: int) -> list[Tensor]:
        out = []
        for j in range(len(slots)):
            y = torch.zeros(HIDDEN, dtype=torch.float64)
            for c in range(HIDDEN):
                for tap in range(min(taps, j + 1)):
                    kernel = w[f"{name}.base_kernel"][side, tap, c] + kernels[j][side, tap, c // group]
                    y[c] += kernel * slots[j - tap][c]
            out.append(y)
        return out

    return convolve


def slow_block(drafter: BlockDrafter, states: Tensor, anchor: int, token: int) -> list[Tensor]:
    """Hidden states of all slots of the block at ``anchor``; ``states`` [T, 3, H] of one document."""
    w = {name: value.detach() for name, value in drafter.state_dict().items()}
    config = drafter.config
    context = [slow_norm(w["fc.weight"] @ states[t].reshape(-1), w["hidden_norm.weight"]) for t in range(anchor)]
    slots = [drafter.embed_tokens[token if j == 0 else MASK] for j in range(config.block_size)]
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        inputs = [slow_norm(x, w[at + "input_layernorm.weight"]) for x in slots]
        if isinstance(config, DFlash2Config):
            convolve = slow_conv(w, at + "attention_conv", inputs)
            inputs = convolve(inputs, 0)

        def heads(x: Tensor, name: str, position: int | None, at: str = at) -> list[Tensor]:
            parts = list((w[f"{at}self_attn.{name}_proj.weight"] @ x).split(8))
            if position is None:
                return parts
            return [slow_rope(slow_norm(part, w[f"{at}self_attn.{name}_norm.weight"]), position) for part in parts]

        seen = [(t, heads(x, "k", t), heads(x, "v", None)) for t, x in enumerate(context)]
        seen += [(anchor + j, heads(x, "k", anchor + j), heads(x, "v", None)) for j, x in enumerate(inputs)]
        attended = []
        for j, x in enumerate(inputs):
            mixed = []
            window = config.sliding_window or anchor + j + 1
            near = [(keys, values) for position, keys, values in seen if position > anchor + j - window]
            for h, query in enumerate(heads(x, "q", anchor + j)):
                scores = [math.exp(float(query @ keys[h // 2]) / math.sqrt(8)) for keys, _ in near]
                mixed.append(sum(s / sum(scores) * values[h // 2] for s, (_, values) in zip(scores, near, strict=True)))
            attended.append(w[at + "self_attn.o_proj.weight"] @ torch.cat(mixed))
        if isinstance(config, DFlash2Config):
            attended = convolve(attended, 1)
        slots = [x + y for x, y in zip(slots, attended, strict=True)]
        inputs = [slow_norm(x, w[at + "post_attention_layernorm.weight"]) for x in slots]
        if isinstance(config, DFlash2Config):
            convolve = slow_conv(w, at + "mlp_conv", inputs)
            inputs = convolve(inputs, 0)
        outputs = []
        for x in inputs:
            gate, up = w[at + "mlp.gate_proj.weight"] @ x, w[at + "mlp.up_proj.weight"] @ x
            outputs.append(w[at + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
        if isinstance(config, DFlash2Config):
            outputs = convolve(outputs, 1)
        slots = [x + y for x, y in zip(slots, outputs, strict=True)]
    return [slow_norm(x, w["norm.weight"]) for x in slots]


def softmax(logits: Tensor) -> Tensor:
    return torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()


def slow_losses(drafter: BlockDrafter, head: VerifierHead, doc: dict[str, Tensor]) -> tuple[list[float], list[int]]:
    """Summed loss, and how many drafts are right, for each draft position of one document."""
    w = {name: value.detach() for name, value in drafter.state_dict().items()}
    config = drafter.config
    tokens, length = doc["tokens"].tolist(), len(doc["tokens"])
    drafts = config.block_size if config.sample_from_anchor else config.block_size - 1
    losses, right = [0.0] * drafts, [0] * drafts
    for anchor in range(length):
        if not doc["mask"][anchor]:
            continue
        slots = slow_block(drafter, doc["states"][:, :3], anchor, tokens[anchor])
        for k, hidden in enumerate(slots[-drafts:]):
            predicted = anchor + 1 + k
            if predicted >= length or not doc["mask"][predicted]:
                continue
            logits = w["lm_head.weight"] @ hidden
            p = softmax(head.lm_head @ slow_norm(doc["states"][predicted - 1, 3], head.norm_weight))
            if isinstance(config, DSparkConfig):
                markov = w["markov_head.markov_w1.weight"][tokens[predicted - 1]]
                q = softmax(logits + w["markov_head.markov_w2.weight"] @ markov)
                overlap = float(torch.minimum(p, q).sum())
                losses[k] += 0.1 * -math.log(q[int(p.argmax())]) + 0.9 * (1 - overlap)
                probe = torch.cat([hidden, markov]).float()
                score = w["confidence_head.proj.weight"][0].float() @ probe + w["confidence_head.proj.bias"][0].float()
                confidence = 1 / (1 + math.exp(-float(score)))
                losses[k] -= overlap * math.log(confidence) + (1 - overlap) * math.log(1 - confidence)
                best = int(KEPT[int(q.argmax())])
            else:
                q = softmax(logits)
                losses[k] += float((p * torch.log(p / q)).sum())
                best = int(KEPT[int(q.argmax())]) if len(logits) == 16 else int(q.argmax())
            if isinstance(config, DFlash2Config):
                ranked = logits.argsort(descending=True)[:TOP_K].tolist()
                missing = tokens[predicted] not in ranked
                if missing:
                    ranked[-1] = tokens[predicted]
                name = "candidate_selector."
                left = w[name + "predecessor_codebook"][tokens[predicted - 1]] * (
                    w[name + "hidden_projection.weight"] @ hidden
                )
                scores = torch.stack([logits[c] + left @ w[name + "successor_codebook"][c] for c in ranked])
                losses[k] -= math.log(softmax(scores)[ranked.index(tokens[predicted])])
                best = ranked[int(scores.argmax())] if not missing else -1
            right[k] += best == tokens[predicted]
    return losses, right


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_forward_is_the_definition(name: str) -> None:
    drafter, head, objective = make(name)
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    losses, sums = objective(pack([documents[:2], documents[2:4], documents[4:]], 18))
    expected = [slow_losses(drafter, head, doc) for doc in documents]
    wanted = torch.tensor([loss for loss, _ in expected], dtype=torch.float64).sum(dim=0)
    # The confidence head computes in float32.
    tolerance = 1e-6 if name.startswith("dspark") else 1e-9
    torch.testing.assert_close(losses.detach(), wanted, rtol=tolerance, atol=tolerance)
    right = torch.tensor([right for _, right in expected]).sum(dim=0)
    assert torch.equal(sums[2], right.double())


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_separate_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _, objective = make(name)
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    packed_loss, packed_sums = objective(pack([documents[:3], documents[3:]], 30))
    packed_loss.sum().backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in drafter.named_parameters() if p.requires_grad}
    drafter.zero_grad()
    monkeypatch.setattr(drafter_module, "MAX_LOGITS", 3 * objective.steps * 16)
    monkeypatch.setattr(attention_module, "MAX_SCORES", 200)
    alone = [objective(pack([[doc]], len(doc["tokens"]))) for doc in documents]
    torch.stack([loss for loss, _ in alone]).sum().backward()
    torch.testing.assert_close(packed_loss, torch.stack([loss for loss, _ in alone]).sum(dim=0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(packed_sums[1:], torch.stack([sums for _, sums in alone]).sum(dim=0)[1:])
    for parameter_name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_sees_its_own_tokens_and_the_states_before_it(name: str) -> None:
    """No other document, no other block, nothing at the anchor or after it."""
    _, _, objective = make(name)
    start, at = 9, 17  # the second document begins at 9
    window = CONFIGS[name][0].sliding_window
    for k in range(objective.steps):
        anchor = at - 1 - k
        batch = pack([[document(9, 0), document(12, 1)]], 21)
        batch.loss_mask[:] = False
        batch.loss_mask[0, [anchor, at]] = True  # one block, and of its drafts one with a loss
        batch.hidden_states.requires_grad_()
        losses, _ = objective(batch)
        [gradient] = torch.autograd.grad(losses[k], batch.hidden_states)
        seen = gradient[0, :, :3].abs().sum(dim=(-1, -2)).nonzero()[:, 0].tolist()
        first = start if window is None else max(start, seen[0])
        assert seen == list(range(first, anchor))
        changed = (batch.token_ids + 2) % VOCAB
        changed[0, anchor : at + 1] = batch.token_ids[0, anchor : at + 1]
        again, _ = objective(replace(batch, token_ids=changed))
        torch.testing.assert_close(again[k], losses[k], rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_proposer_is_the_training_forward(name: str) -> None:
    """Fed piece by piece, it drafts what the slow computation says; DSpark and DFlash2 walk along their own choices."""
    drafter, _, _ = make(name)
    config = drafter.config
    doc = document(12, 3)
    tokens, states = doc["tokens"].tolist(), doc["states"][:, :3]
    kept = None if drafter.full_vocabulary else KEPT
    w = drafter.state_dict()
    proposer = drafter.proposer(kept, config.drafts)
    proposer.states = proposer.states.double()  # type: ignore[attr-defined]
    read = 0
    for end in (5, 6, 9):
        draft = proposer.propose(states[read:end], tokens[read + 1 : end + 1])
        read = end
        expected, previous = [], tokens[end]
        for hidden in slow_block(drafter, states, end, tokens[end])[-config.drafts :]:
            logits = w["lm_head.weight"] @ hidden
            if isinstance(config, DSparkConfig):
                logits += w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][previous]
            if isinstance(config, DFlash2Config):
                ranked = logits.argsort(descending=True)[:TOP_K]
                name_ = "candidate_selector."
                left = w[name_ + "predecessor_codebook"][previous] * (w[name_ + "hidden_projection.weight"] @ hidden)
                scores = [logits[c] + left @ w[name_ + "successor_codebook"][c] for c in ranked]
                previous = int(ranked[int(torch.stack(scores).argmax())])
            else:
                previous = int(logits.argmax() if kept is None else kept[logits.argmax()])
            expected.append(previous)
        assert draft == expected


def test_anchors_are_drawn_anew_for_each_batch_and_the_same_again() -> None:
    _, _, objective = make("dflash", max_anchors=3)
    batches = [pack([[document(12, seed)], [document(9, seed + 10)]], 14) for seed in range(8)]
    drawn = []
    for batch in batches:
        anchors, real = objective._anchors(batch)
        assert int(real.sum()) == 3
        rows = torch.arange(2)[:, None].expand_as(anchors)
        assert batch.loss_mask[rows[real], anchors[real]].all()
        again, _ = objective._anchors(batch)
        assert torch.equal(anchors, again)
        drawn.append((rows[real] * 14 + anchors[real]).tolist())
    assert len({tuple(d) for d in drawn}) > 3
    objective.eval()
    assert int(objective._anchors(batches[0])[1].sum()) == int(batches[0].loss_mask.sum())


def test_d_pace_weighs_a_slot_by_the_confidence_before_it() -> None:
    losses = -torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.2]]).log()
    expected = torch.tensor([[1.0, 1.0], [0.95, 0.55], [0.95 * 0.75, 0.55 * 0.75]])
    torch.testing.assert_close(pace(losses), expected)
    drafter, _, paced = make("dflash", loss="ce", position_weights="d_pace")
    plain = drafter.objective(paced.head, KEPT, TrainConfig(loss="ce"))
    batch = pack([[document(12, 0)]], 12)
    first, then = paced(batch)[0], plain(batch)[0]
    torch.testing.assert_close(first[0], then[0])
    assert bool((first[1:] < then[1:]).all())
    assert paced.weights.tolist() == [1.0, 1.0, 1.0]
    assert plain.weights.tolist() == pytest.approx([1, math.exp(-0.25), math.exp(-0.5)])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_anchors_has_zero_gradients_everywhere(name: str) -> None:
    drafter, _, objective = make(name)
    doc = document(6, 0)
    losses, sums = objective(pack([[{**doc, "mask": torch.zeros(6, dtype=torch.bool)}]], 8))
    losses.sum().backward()
    assert not losses.any()
    assert not sums.any()
    for parameter in drafter.parameters():  # DDP waits for all of them
        assert not parameter.requires_grad or (parameter.grad is not None and not parameter.grad.any())


def test_whole_vocabulary_shares_the_frozen_head() -> None:
    drafter = DFlashDrafter(replace(CONFIGS["dflash"][0], draft_vocab_size=VOCAB))  # type: ignore[arg-type]
    assert drafter.shares_lm_head
    assert not drafter.lm_head.weight.requires_grad
    assert "lm_head.weight" not in drafter.stored_tensors()
    reduced = DFlashDrafter(CONFIGS["dflash"][0])  # type: ignore[arg-type]
    assert "lm_head.weight" in reduced.stored_tensors()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_drafter_has_finite_losses_and_learns(name: str) -> None:
    drafter, head, objective = make(name)
    drafter.initialise(head)
    batch = pack([[document(12, 0), document(9, 1)]], 24)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    first = None
    for _ in range(30):
        optimizer.zero_grad()
        loss = objective(batch)[0].sum()
        loss.backward()
        optimizer.step()
        first = first if first is not None else float(loss.detach())
    assert loss.item() < 0.7 * first
