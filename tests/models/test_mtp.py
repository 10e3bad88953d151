"""MTP heads of every family against a slow computation: one position at a time, the layer as transformers runs it."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators.checkpoints.stitch import read_mtp_head
from speculators.config import TrainConfig
from speculators.errors import CheckpointError
from speculators.models.batch import PackedBatch
from speculators.models.drafter import Objective
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.verifier_head import VerifierHead
from tests.models.test_eagle3 import document, pack
from tests.models.tiny_mtp import CONFIGS, EXPERTS, NAMES, write_mtp_verifier

STEPS = 3
LENGTHS = [9, 5, 12, 3, 7]
FAMILIES = list(CONFIGS)
HIDDEN_FIRST = {"mimo"}
NORMED_STATES = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe"}
NORMED_FEATURES = {"mimo", "qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3"}
NO_FIRST_EMBEDDING = {"mimo", "deepseek_v3", "glm4_moe"}
PLUS_ONE = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}  # norms multiply by 1 + weight


def make(family: str, folder: Path) -> tuple[MtpDrafter, VerifierHead, Objective]:
    verifier, tensors = write_mtp_verifier(folder / "verifier", family)
    drafter = MtpDrafter(MtpConfig.for_folder(verifier.path)).double()
    head = VerifierHead.load(verifier, None, torch.float64)
    drafter.initialise(head)
    drafter.embed_tokens = drafter.embed_tokens.double()
    drafter.load_head(tensors)
    return drafter, head, drafter.objective(head, None, TrainConfig(method="mtp", ttt_steps=STEPS))


def packed(rows: list[list[dict[str, Tensor]]], size: int) -> PackedBatch:
    """As a batch of another method, but with the last layer's states alone."""
    batch = pack(rows, size)
    return PackedBatch(
        batch.token_ids, batch.hidden_states[:, :, -1:], batch.loss_mask, batch.document_ids, batch.positions
    )


def slow_outputs(family: str, drafter: MtpDrafter, head: VerifierHead, doc: dict[str, Tensor]) -> Tensor:
    """What goes into lm_head [length, K, H]: for each position the sequence that serving would have run."""
    layer = deepcopy(drafter.layer)
    layer.self_attn.config._attn_implementation = "eager"
    rotary = drafter._rotary[0]
    around = {name: value.detach() for name, value in drafter.state_dict().items() if not name.startswith("layer.")}
    tokens, length = doc["tokens"].tolist(), len(doc["tokens"])
    shift = 1.0 if family in PLUS_ONE else 0.0

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-5) * (weight + shift)

    def combine(state: Tensor, token: int, position: int) -> Tensor:
        embedding = drafter.embed_tokens[token]
        if position == 0 and family in NO_FIRST_EMBEDDING:
            embedding = embedding * 0
        halves = [norm(embedding, around["embedding_norm.weight"]), norm(state, around["hidden_norm.weight"])]
        return around["projection.weight"] @ torch.cat(halves[::-1] if family in HIDDEN_FIRST else halves)

    def run(inputs: list[Tensor]) -> Tensor:
        size = len(inputs)
        x = torch.stack(inputs)[None]
        mask = torch.full((size, size), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        cos_sin = rotary(x, torch.arange(size)[None])
        return layer(hidden_states=x, attention_mask=mask, position_embeddings=cos_sin)[0, -1]

    states = doc["states"][:, 3]
    if family in NORMED_STATES:
        states = torch.stack([state / torch.sqrt((state * state).mean() + 1e-5) * head.norm_weight for state in states])
    verified = [combine(states[t], tokens[t + 1] if t + 1 < length else 0, t) for t in range(length)]
    outputs = []
    for t in range(length):
        sequence, found = verified[: t + 1], []
        for k in range(STEPS):
            out = run(sequence)
            normed = norm(out, around["final_norm.weight"])
            found.append(normed)
            following = t + 2 + k
            feature = normed if family in NORMED_FEATURES else out
            sequence = [*sequence, combine(feature, tokens[following] if following < length else 0, t + k + 1)]
        outputs.append(torch.stack(found))
    return torch.stack(outputs)


@torch.no_grad()
def slow_losses(family: str, drafter: MtpDrafter, head: VerifierHead, doc: dict[str, Tensor]) -> list[float]:
    """Sum of -log q(the token in the data) over a document for each step."""
    outputs, sums = slow_outputs(family, drafter, head, doc), [0.0] * STEPS
    for t, k in ((t, k) for t in range(len(outputs)) for k in range(STEPS)):
        predicted = t + 2 + k
        if predicted < len(doc["tokens"]) and doc["mask"][predicted]:
            sums[k] -= float(torch.log_softmax(head.lm_head @ outputs[t, k], 0)[doc["tokens"][predicted]])
    return sums


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_is_the_definition(family: str, tmp_path: Path) -> None:
    drafter, head, objective = make(family, tmp_path)
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    losses, _ = objective(packed([documents[:2], documents[2:4], documents[4:]], 18))
    expected = torch.tensor([slow_losses(family, drafter, head, doc) for doc in documents], dtype=torch.float64).sum(0)
    # transformers computes norms and routing in float32.
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str, tmp_path: Path) -> None:
    drafter, _, objective = make(family, tmp_path)
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    packed_loss, packed_sums = objective(packed([documents[:3], documents[3:]], 30))
    packed_loss.sum().backward()
    names = [name for name, parameter in drafter.named_parameters() if parameter.grad is not None]
    gradients = [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]
    assert "lm_head.weight" not in names
    assert any(name.startswith("layer.mlp") for name in names)
    drafter.zero_grad()
    alone = [objective(packed([[doc]], len(doc["tokens"]))) for doc in documents]
    torch.stack([loss for loss, _ in alone]).sum().backward()
    torch.testing.assert_close(packed_loss, torch.stack([loss for loss, _ in alone]).sum(dim=0))
    torch.testing.assert_close(packed_sums, torch.stack([sums for _, sums in alone]).sum(dim=0))
    after = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    for one, other in zip(gradients, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # norms in float32


def test_no_position_sees_another_document_or_the_future(tmp_path: Path) -> None:
    """A loss at one position alone: of the states, those that it may see have a gradient, the others none."""
    _, _, objective = make("mimo", tmp_path)
    batch = packed([[document(9, 0), document(8, 1)]], 17)
    batch.hidden_states.requires_grad_()
    at = 13  # in the second document, which begins at 9
    batch.loss_mask[:] = False
    batch.loss_mask[0, at] = True
    losses, _ = objective(batch)
    losses[0].backward(retain_graph=True)
    moved = batch.hidden_states.grad[0, :, 0].abs().sum(dim=-1) > 0
    assert moved.tolist() == [9 <= t <= at - 2 for t in range(17)]
    batch.hidden_states.grad = None
    losses[2].backward()
    moved = batch.hidden_states.grad[0, :, 0].abs().sum(dim=-1) > 0
    assert moved.tolist() == [9 <= t <= at - 4 for t in range(17)]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_proposer_is_the_definition(family: str, tmp_path: Path) -> None:
    """Drafting with a KV cache, its own tokens fed back, gives what the slow computation gives on those tokens."""
    drafter, head, _ = make(family, tmp_path)
    doc = document(12, 3)
    tokens, states = doc["tokens"].tolist(), doc["states"][:, 3:]
    proposer, read = drafter.proposer(None, STEPS), 0
    for end in (4, 5, 8):
        draft = proposer.propose(states[read:end], tokens[read + 1 : end + 1])
        read = end
        written = torch.tensor([*tokens[: end + 1], *draft])
        slow = {"tokens": written, "states": doc["states"][: len(written)], "mask": torch.ones(len(written))}
        outputs = slow_outputs(family, drafter, head, slow)[end - 1]
        assert draft == [int((head.lm_head @ output).argmax()) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_head_round_trip_under_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    verifier, tensors = write_mtp_verifier(tmp_path / "verifier", family)
    assert set(tensors) == NAMES[family]
    head = read_mtp_head(verifier.path)
    assert set(head.tensors) == NAMES[family]
    drafter = MtpDrafter(MtpConfig.for_folder(verifier.path))
    drafter.load_head(head.tensors)
    stored = drafter.stored_tensors()
    assert set(stored) == NAMES[family]
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_experts_one_by_one_or_fused_are_the_same_head(family: str, tmp_path: Path) -> None:
    verifier, tensors = write_mtp_verifier(tmp_path / "verifier", family)
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    where = next(name for name in tensors if ".experts.0.gate_proj" in name).removesuffix(".0.gate_proj.weight")
    fused[f"{where}.gate_up_proj"] = torch.stack(
        [torch.cat([tensors[f"{where}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(EXPERTS)]
    )
    fused[f"{where}.down_proj"] = torch.stack([tensors[f"{where}.{e}.down_proj.weight"] for e in range(EXPERTS)])
    one, other = (MtpDrafter(MtpConfig.for_folder(verifier.path)) for _ in range(2))
    one.load_head(tensors)
    other.load_head(fused)
    assert set(other.stored_tensors()) == set(fused)
    for name, parameter in one.layer.state_dict().items():
        assert torch.equal(parameter, other.layer.state_dict()[name]), name


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    verifier, tensors = write_mtp_verifier(tmp_path / "verifier", "mimo")
    drafter = MtpDrafter(MtpConfig.for_folder(verifier.path))
    at = "model.mtp_layers.0."
    missing = {name: tensor for name, tensor in tensors.items() if name != f"{at}input_proj.weight"}
    with pytest.raises(CheckpointError, match=r"no tensor model\.mtp_layers\.0\.input_proj\.weight"):
        drafter.load_head(missing)
    with pytest.raises(CheckpointError, match=r"input_proj\.weight is \[24, 24\].*asks for \[24, 48\]"):
        drafter.load_head({**tensors, f"{at}input_proj.weight": torch.zeros(24, 24)})
    with pytest.raises(CheckpointError, match=r"model\.mtp_layers\.0\.extra\.weight is unknown"):
        drafter.load_head({**tensors, f"{at}extra.weight": torch.zeros(1)})


def test_weights_of_the_steps(tmp_path: Path) -> None:
    """0.6**k, normalised (FastMTP)."""
    _, _, objective = make("mimo", tmp_path)
    expected = torch.tensor([1.0, 0.6, 0.36]) / 1.96
    torch.testing.assert_close(objective.weights, expected)
    assert math.isclose(float(objective.weights.sum()), 1.0, rel_tol=1e-6)
