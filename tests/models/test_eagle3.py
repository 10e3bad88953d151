"""EAGLE-3's training forward against a slow computation written from the method's definition alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speculators.config import TrainConfig
from speculators.models import drafter as drafter_module
from speculators.models.attention import StepKeys, document_mask
from speculators.models.batch import PackedBatch
from speculators.models.drafter import Objective
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter
from speculators.models.verifier_head import VerifierHead

STEPS, VOCAB, HIDDEN = 3, 40, 24
CONFIG = Eagle3Config(
    hidden_size=HIDDEN,
    intermediate_size=36,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,  # heads x head_dim differs from the hidden size on purpose
    num_layers=1,
    vocab_size=VOCAB,
    draft_vocab_size=16,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=64,
    target_hidden_size=HIDDEN,
    aux_layer_ids=(1, 2, 3),
)
KEPT = torch.arange(0, VOCAB, 2)[:16] + 1


def make(config: Eagle3Config = CONFIG, seed: int = 0) -> tuple[Eagle3Drafter, VerifierHead, Objective]:
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config).double()
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    drafter.embed_tokens.normal_()
    head = VerifierHead(
        drafter.embed_tokens.clone(),
        torch.randn(16, HIDDEN, dtype=torch.float64),
        torch.rand(HIDDEN, dtype=torch.float64) + 0.5,
        1e-5,
    )
    return drafter, head, drafter.objective(head, KEPT, TrainConfig(ttt_steps=STEPS))


def document(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prompt = length // 3
    return {
        "tokens": torch.randint(VOCAB, (length,), generator=generator),
        "states": torch.randn(length, 4, HIDDEN, generator=generator, dtype=torch.float64),
        "mask": torch.arange(length) >= prompt,
    }


def pack(rows: list[list[dict[str, Tensor]]], size: int) -> PackedBatch:
    count = len(rows)
    tokens = torch.zeros(count, size, dtype=torch.long)
    states = torch.zeros(count, size, 4, HIDDEN, dtype=torch.float64)
    mask = torch.zeros(count, size, dtype=torch.bool)
    ids = torch.full((count, size), -1)
    positions = torch.zeros(count, size, dtype=torch.long)
    for row, documents in enumerate(rows):
        start = 0
        for number, doc in enumerate(documents):
            end = start + len(doc["tokens"])
            tokens[row, start:end], states[row, start:end] = doc["tokens"], doc["states"]
            mask[row, start:end], ids[row, start:end] = doc["mask"], number
            positions[row, start:end] = torch.arange(end - start)
            start = end
    return PackedBatch(tokens, states, mask, ids, positions)


# --- the slow computation: one document, one position at a time, nothing shared with the package ---


def slow_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + 1e-5) * weight


def slow_rope(vector: Tensor, position: int) -> Tensor:
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position / 10000.0 ** (2 * i / len(vector))
        a, b = float(vector[i]), float(vector[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def slow_losses(drafter: Eagle3Drafter, head: VerifierHead, doc: dict[str, Tensor]) -> list[float]:
    """Sum of KL(p || q) over a document for each step, by definition."""
    w = {name: value.detach() for name, value in drafter.state_dict().items()}
    layer = "layers.0."
    tokens, length = doc["tokens"].tolist(), len(doc["tokens"])
    features = [w["fc.weight"] @ doc["states"][t, :3].reshape(-1) for t in range(length)]
    heads, kv_heads, dim = 4, 2, 8
    step_keys: list[list[list[Tensor]]] = []
    step_values: list[list[list[Tensor]]] = []
    sums = []
    for k in range(STEPS):
        keys, values, queries, residuals = [], [], [], []
        for t in range(length):
            token = tokens[t + 1 + k] if t + 1 + k < length else 0
            normed = slow_norm(features[t], w[layer + "hidden_norm.weight"])
            embedded = slow_norm(drafter.embed_tokens[token], w[layer + "input_layernorm.weight"])
            x = torch.cat([embedded, normed])
            residuals.append(normed)
            q, key, value = (w[f"{layer}self_attn.{name}_proj.weight"] @ x for name in "qkv")
            queries.append([slow_rope(q[h * dim : (h + 1) * dim], t + k) for h in range(heads)])
            keys.append([slow_rope(key[h * dim : (h + 1) * dim], t + k) for h in range(kv_heads)])
            values.append([value[h * dim : (h + 1) * dim] for h in range(kv_heads)])
        step_keys.append(keys)
        step_values.append(values)
        total, following = 0.0, []
        for t in range(length):
            mixed = []
            for h in range(heads):
                group = h // (heads // kv_heads)
                seen = [(step_keys[0][s][group], step_values[0][s][group]) for s in range(t + 1)]
                seen += [(step_keys[j][t][group], step_values[j][t][group]) for j in range(1, k + 1)]
                scores = [math.exp(float(queries[t][h] @ key) / math.sqrt(dim)) for key, _ in seen]
                mixed.append(sum(s / sum(scores) * v for s, (_, v) in zip(scores, seen, strict=True)))
            attended = residuals[t] + w[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
            y = slow_norm(attended, w[layer + "post_attention_layernorm.weight"])
            gate, up = w[layer + "mlp.gate_proj.weight"] @ y, w[layer + "mlp.up_proj.weight"] @ y
            out = attended + w[layer + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
            following.append(out)
            predicted = t + 2 + k
            if predicted < length and doc["mask"][predicted]:
                q_logits = w["lm_head.weight"] @ slow_norm(out, w["norm.weight"])
                p_logits = head.lm_head @ slow_norm(doc["states"][predicted - 1, 3], head.norm_weight)
                p = torch.exp(p_logits) / torch.exp(p_logits).sum()
                q = torch.exp(q_logits) / torch.exp(q_logits).sum()
                total += float((p * torch.log(p / q)).sum())
        features = following
        sums.append(total)
    return sums


@pytest.fixture
def documents() -> list[dict[str, Tensor]]:
    return [document(length, seed) for seed, length in enumerate([9, 5, 12, 3, 7])]


def test_packed_forward_is_the_definition(documents: list[dict[str, Tensor]]) -> None:
    drafter, head, objective = make()
    batch = pack([[documents[0], documents[1]], [documents[2], documents[3]], [documents[4]]], 18)
    losses, _ = objective(batch)
    expected = torch.tensor([slow_losses(drafter, head, doc) for doc in documents], dtype=torch.float64).sum(dim=0)
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layers", [1, 2])
def test_packed_equals_separate(documents: list[dict[str, Tensor]], layers: int) -> None:
    drafter, _, objective = make(replace(CONFIG, num_layers=layers))
    packed_loss, packed_sums = objective(pack([documents[:3], documents[3:]], 30))
    packed_loss.sum().backward()
    packed_gradients = [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]
    drafter.zero_grad()
    alone = [objective(pack([[doc]], len(doc["tokens"]))) for doc in documents]
    torch.stack([loss for loss, _ in alone]).sum().backward()
    torch.testing.assert_close(packed_loss, torch.stack([loss for loss, _ in alone]).sum(dim=0))
    torch.testing.assert_close(packed_sums, torch.stack([sums for _, sums in alone]).sum(dim=0))
    for packed, parameter in zip(packed_gradients, drafter.parameters(), strict=True):
        torch.testing.assert_close(packed, parameter.grad)


def test_no_gradient_from_other_documents_or_the_future(documents: list[dict[str, Tensor]]) -> None:
    drafter, _, _ = make()
    batch = pack([[documents[0], documents[2]]], 24)
    states = batch.hidden_states.clone().requires_grad_(True)
    mask = document_mask(batch.document_ids)
    watched = 9 + 4  # in the second document
    past = [StepKeys()]
    features = drafter.fuse(states[:, :, :3].flatten(2))
    for k in range(STEPS):
        shifted = torch.nn.functional.pad(batch.token_ids[:, 1 + k :], (0, 1 + k))
        hidden, features = drafter.step(features, shifted, batch.positions + k, past, mask)
        (gradient,) = torch.autograd.grad(hidden[0, watched].sum(), states, retain_graph=True)
        touched = gradient[0].abs().sum(dim=(1, 2)) > 0
        assert touched[9 : watched + 1].all()
        assert not touched[:9].any()
        assert not touched[watched + 1 :].any()


def test_decoding_with_a_cache_is_the_unrolled_step(documents: list[dict[str, Tensor]]) -> None:
    """Drafting as vLLM does it, from every position, gives what training saw on the same tokens."""
    drafter, _, _ = make(replace(CONFIG, num_layers=2))
    doc = documents[2]
    length = len(doc["tokens"])
    batch = pack([[doc]], length)
    fused = drafter.fuse(batch.hidden_states[:, :, :3].flatten(2))
    mask, past = document_mask(batch.document_ids), [StepKeys() for _ in range(2)]
    unrolled, features = [], fused
    for k in range(STEPS):
        shifted = torch.nn.functional.pad(batch.token_ids[:, 1 + k :], (0, 1 + k))
        hidden, features = drafter.step(features, shifted, batch.positions + k, past, mask)
        unrolled.append(hidden[0])
    for t in range(length - 1 - STEPS):
        cache = drafter.new_cache()
        hidden, last = drafter.decode(
            fused[:, : t + 1], doc["tokens"][None, 1 : t + 2], torch.arange(t + 1)[None], cache
        )
        torch.testing.assert_close(hidden[0, -1], unrolled[0][t])
        last = last[:, -1:]
        for k in range(1, STEPS):
            token = doc["tokens"][None, t + 1 + k, None]
            hidden, last = drafter.decode(last, token, torch.tensor([[t + k]]), cache)
            torch.testing.assert_close(hidden[0, -1], unrolled[k][t])
        cache.truncate(t + 1)
        again, _ = drafter.decode(
            drafter.decode(
                fused[:, : t + 1], doc["tokens"][None, 1 : t + 2], torch.arange(t + 1)[None], drafter.new_cache()
            )[1][:, -1:],
            doc["tokens"][None, t + 2, None],
            torch.tensor([[t + 1]]),
            cache,
        )
        torch.testing.assert_close(again[0, -1], unrolled[1][t])


def test_sums_count_what_they_say(documents: list[dict[str, Tensor]]) -> None:
    drafter, _, objective = make()
    doc = documents[2]
    _, sums = objective(pack([[doc]], 16))
    tokens, mask, length = doc["tokens"], doc["mask"], len(doc["tokens"])
    for k in range(STEPS):
        positions = [t for t in range(length) if t + 2 + k < length and mask[t + 2 + k]]
        assert int(sums[1, k]) == len(positions)
        assert sums[4, k] <= sums[2, k] <= sums[1, k]
        assert sums[3, k] <= sums[1, k]
    assert int(sums[3, 0]) == int(sums[1, 0])
    # A drafter that only ever proposes the true token is right wherever that token is in its vocabulary.
    torch.nn.init.zeros_(drafter.lm_head.weight)
    _, sums = objective(pack([[{**doc, "tokens": torch.full_like(tokens, int(KEPT[0]))}]], 16))
    assert torch.equal(sums[2], sums[1])
    assert torch.equal(sums[4], sums[3])


def test_chunks_with_recomputation_change_nothing(
    documents: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, _, objective = make()
    batch = pack([documents[:3], documents[3:]], 30)
    whole, sums = objective(batch)
    whole.sum().backward()
    gradients = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()
    monkeypatch.setattr(drafter_module, "MAX_LOGITS", 3 * STEPS * 16)
    chunked, chunked_sums = objective(batch)
    chunked.sum().backward()
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(chunked_sums, sums)
    for before, parameter in zip(gradients, drafter.parameters(), strict=True):
        torch.testing.assert_close(before, parameter.grad)


def test_a_batch_without_loss_positions_is_finite() -> None:
    drafter, _, objective = make()
    doc = document(6, 0)
    losses, sums = objective(pack([[{**doc, "mask": torch.zeros(6, dtype=torch.bool)}]], 8))
    losses.sum().backward()
    assert torch.equal(losses, torch.zeros(STEPS, dtype=torch.float64))
    assert not sums.any()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in drafter.parameters())
