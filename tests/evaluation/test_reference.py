"""The reference decoder against plain decoding, against a slow decoder without caches, and against vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from speculators.data.vocabulary import VocabMapping, build_vocab_mapping
from speculators.evaluation.acceptance import Acceptance
from speculators.evaluation.reference import ReferenceResult, reference_decode, reference_sample, reject
from speculators.models.autoregressive import AutoregressiveProposer
from speculators.models.eagle3 import Eagle3Config, Eagle3Drafter

HIDDEN, VOCAB, LAYERS = 64, 96, 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_drafter(
    model: LlamaForCausalLM, draft_vocab: int = VOCAB, num_layers: int = 1, seed: int = 1
) -> Eagle3Drafter:
    """A random drafter, with enough of the verifier in it to be right now and then."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_layers=num_layers,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256,
        target_hidden_size=HIDDEN,
        aux_layer_ids=(0, 1),
    )
    drafter = Eagle3Drafter(config).eval()
    drafter.embed_tokens = model.model.embed_tokens.weight.detach().clone()
    return drafter


def plain_greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def decode(
    model: LlamaForCausalLM, drafter: Any, mapping: VocabMapping | None, prompt: list[int], k: int, *rest: Any
) -> ReferenceResult:
    proposer = drafter.proposer(None if mapping is None else mapping.kept_ids, k)
    return reference_decode(model, proposer, drafter.config.aux_layer_ids, prompt, k, *rest)


@torch.no_grad()
def slow_decode(
    model: LlamaForCausalLM,
    drafter: Eagle3Drafter,
    kept: list[int],
    prompt: list[int],
    k: int,
    max_tokens: int,
    stop_ids: set[int],
) -> ReferenceResult:
    """Draft and verify without any cache: every step computes everything anew from the tokens alone."""

    def verify(tokens: list[int]) -> tuple[list[int], Tensor]:
        output = model(torch.tensor([tokens]), output_hidden_states=True)
        states = torch.cat([output.hidden_states[i][0] for i in drafter.config.aux_layer_ids], dim=-1)
        return output.logits[0].argmax(-1).tolist(), states

    tokens, drafts, per_position = list(prompt), 0, [0] * k
    tokens.append(verify(tokens)[0][-1])
    while len(tokens) - len(prompt) < max_tokens and not stop_ids & set(tokens[len(prompt) :]):
        features = drafter.fuse(verify(tokens[:-1])[1])
        draft: list[int] = []
        for _ in range(k):
            inputs = torch.tensor([[*tokens[1:], *draft]])
            positions = torch.arange(inputs.shape[1])[None]
            hidden, following = drafter.decode(features[None], inputs, positions, drafter.new_cache())
            draft.append(kept[int(drafter.lm_head(hidden[0, -1]).argmax())])
            features = torch.cat([features, following[0, -1:]])
        choices = verify([*tokens, *draft])[0][len(tokens) - 1 :]
        accepted = next((i for i in range(k) if draft[i] != choices[i]), k)
        for i in range(accepted):
            per_position[i] += 1
        drafts += 1
        tokens += choices[: accepted + 1]
    generated = tokens[len(prompt) :][:max_tokens]
    end = next((i + 1 for i, token in enumerate(generated) if token in stop_ids), len(generated))
    return ReferenceResult(generated[:end], drafts, sum(per_position), per_position)


PROMPTS = [[1, 5, 9, 40], [2], [60, 61, 62, 63, 64, 65, 66, 67], [11, 11, 11]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("k", [1, 3])
def test_output_equals_plain_greedy_decoding(model: LlamaForCausalLM, prompt: list[int], k: int) -> None:
    result = decode(model, make_drafter(model), None, prompt, k, 24, set())
    assert result.token_ids == plain_greedy(model, prompt, 24)


@pytest.mark.parametrize(("draft_vocab", "num_layers"), [(VOCAB, 1), (40, 1), (VOCAB, 2)])
def test_counts_equal_those_of_a_decoder_without_caches(
    model: LlamaForCausalLM, draft_vocab: int, num_layers: int
) -> None:
    total = Acceptance()
    frequent = [token for prompt in PROMPTS for token in plain_greedy(model, prompt, 24)]
    counts = torch.bincount(torch.tensor(frequent), minlength=VOCAB).numpy()
    mapping = build_vocab_mapping(counts, draft_vocab) if draft_vocab < VOCAB else None
    kept = list(range(VOCAB)) if mapping is None else mapping.kept_ids.tolist()
    drafter = make_drafter(model, draft_vocab, num_layers)
    fit(drafter, model, kept)
    for prompt in PROMPTS:
        fast = decode(model, drafter, mapping, prompt, 3, 24, {frequent[20]})
        assert fast == slow_decode(model, drafter, kept, prompt, 3, 24, {frequent[20]})
        total += fast.acceptance
    assert 0 < total.accepted_tokens < total.draft_tokens


@pytest.mark.parametrize("known", [1, 2, 7, 24, 60])
@pytest.mark.parametrize("spoilt_at", [None, 0, 5])
def test_expected_answer_changes_nothing(model: LlamaForCausalLM, known: int, spoilt_at: int | None) -> None:
    """Whether it is right, too short, too long or wrong somewhere."""
    drafter = make_drafter(model)
    fit(drafter, model, list(range(VOCAB)))
    for prompt in PROMPTS:
        expected = plain_greedy(model, prompt, known)
        if spoilt_at is not None and spoilt_at < known:
            expected[spoilt_at] = (expected[spoilt_at] + 1) % VOCAB
        alone = decode(model, drafter, None, prompt, 3, 24, set())
        assert decode(model, drafter, None, prompt, 3, 24, set(), expected) == alone


def fit(drafter: Eagle3Drafter, model: LlamaForCausalLM, kept: list[int]) -> None:
    """Train the drafter's head on a few greedy continuations, so that some drafts are right and some are not."""
    with torch.no_grad():
        tokens = [[*prompt, *plain_greedy(model, prompt, 12)] for prompt in PROMPTS]
        inputs, targets = [], []
        for sequence in tokens:
            output = model(torch.tensor([sequence]), output_hidden_states=True)
            states = torch.cat([output.hidden_states[i][0] for i in drafter.config.aux_layer_ids], dim=-1)
            features = drafter.fuse(states[:-2])
            positions = torch.arange(len(features))[None]
            hidden, _ = drafter.decode(features[None], torch.tensor([sequence[1:-1]]), positions, drafter.new_cache())
            inputs.append(hidden[0])
            targets += sequence[2:]
    rows = torch.cat(inputs)
    wanted = torch.tensor([kept.index(token) if token in kept else 0 for token in targets])
    optimiser = torch.optim.Adam(drafter.lm_head.parameters(), lr=0.05)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(drafter.lm_head(rows), wanted).backward()
        optimiser.step()


class KnowingHead(nn.Linear):
    """Takes a position, and prefers the token two places after it."""

    def __init__(self, continuation: list[int], prompt_length: int) -> None:
        super().__init__(1, 1)
        self.continuation, self.prompt_length = continuation, prompt_length

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.one_hot(torch.tensor(self.continuation[int(hidden) + 2 - self.prompt_length]), VOCAB)


class Oracle:
    """Stands in for a drafter: knows the continuation, and checks that positions follow those in its cache."""

    config = SimpleNamespace(aux_layer_ids=(1,))

    def __init__(self, continuation: list[int], prompt_length: int) -> None:
        self.lm_head = KnowingHead(continuation, prompt_length)
        self.cached = 0

    def proposer(self, kept_ids: Tensor | None, k: int) -> AutoregressiveProposer:
        return AutoregressiveProposer(self, kept_ids, k)  # type: ignore[arg-type]

    def new_cache(self) -> Oracle:
        return self

    def truncate(self, length: int) -> None:
        self.cached = length

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def decode(self, features: Tensor, token_ids: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        count = positions.shape[1]
        assert positions[0].tolist() == list(range(self.cached, self.cached + count))
        assert features.shape[:2] == token_ids.shape == (1, count)
        self.cached += count
        return positions[..., None].float(), features


def test_drafter_that_is_always_right_gives_full_length(model: LlamaForCausalLM) -> None:
    prompt, k = PROMPTS[0], 3
    continuation = plain_greedy(model, prompt, 40)
    result = decode(model, Oracle(continuation, len(prompt)), None, prompt, k, 25, set())
    assert result.token_ids == continuation[:25]
    assert result.acceptance.length == k + 1
    assert (result.drafts, result.accepted_per_position) == (6, [6, 6, 6])


def test_stop_token_ends_the_answer_but_not_the_count(model: LlamaForCausalLM) -> None:
    """As in vLLM: tokens accepted behind the stop token count, but are not part of the answer."""
    prompt = PROMPTS[0]
    continuation = plain_greedy(model, prompt, 40)
    stop = continuation[2]
    assert stop not in continuation[:2]
    result = decode(model, Oracle(continuation, len(prompt)), None, prompt, 3, 25, {stop})
    assert result == ReferenceResult(continuation[:3], 1, 3, [1, 1, 1])


def test_answer_of_one_token_needs_no_draft(model: LlamaForCausalLM) -> None:
    result = decode(model, make_drafter(model), None, PROMPTS[0], 3, 1, set())
    assert result == ReferenceResult(plain_greedy(model, PROMPTS[0], 1), 0, 0, [0, 0, 0])


def test_no_hook_stays_on_the_verifier(model: LlamaForCausalLM) -> None:
    decode(model, make_drafter(model), None, PROMPTS[0], 3, 4, set())
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("sampled_drafts", [False, True])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 48])
def test_sampling_near_temperature_zero_is_greedy_decoding(
    model: LlamaForCausalLM, draft_vocab: int, sampled_drafts: bool
) -> None:
    drafter = make_drafter(model, draft_vocab)
    counts = torch.arange(VOCAB, 0, -1).numpy()
    mapping = build_vocab_mapping(counts, draft_vocab) if draft_vocab < VOCAB else None
    for prompt in ([5, 9, 2], [40, 3, 3, 17, 60]):
        greedy = decode(model, drafter, mapping, prompt, 3, 24, set())
        kept = None if mapping is None else mapping.kept_ids
        generator = torch.Generator().manual_seed(0)
        sampled = reference_sample(model, drafter, kept, prompt, 3, 24, set(), 1e-4, generator, sampled_drafts)
        assert sampled == greedy


def test_a_seed_repeats_an_answer_and_temperature_changes_it(model: LlamaForCausalLM) -> None:
    drafter = make_drafter(model)

    def sample(seed: int) -> ReferenceResult:
        generator = torch.Generator().manual_seed(seed)
        return reference_sample(model, drafter, None, [5, 9, 2], 3, 24, set(), 2.0, generator, True)

    assert sample(1) == sample(1)
    assert sample(1).token_ids != sample(2).token_ids


@pytest.mark.parametrize("kind", ["sampled", "one-hot"])
def test_rejection_sampling_gives_the_verifiers_distribution(kind: str) -> None:
    """Of the first token, and of the second one after it: a chi-square test at 0.1%, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 5, generator=generator).pow(2)
    p = p / p.sum(dim=-1, keepdim=True)
    q = torch.rand(2, 5, generator=generator).pow(2)
    q = q / q.sum(dim=-1, keepdim=True)
    if kind == "one-hot":
        q = nn.functional.one_hot(q.argmax(dim=-1), 5).float()
    runs, first, second, accepted = 8000, torch.zeros(5), torch.zeros(5), 0
    for _ in range(runs):
        draft = [int(torch.multinomial(row, 1, generator=generator)) for row in q]
        tokens = reject(draft, q, p, generator)
        first[tokens[0]] += 1
        accepted += tokens[0] == draft[0] and len(tokens) > 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    critical = 18.47  # chi-square, 4 degrees of freedom, 0.1%
    assert float(((first - runs * p[0]) ** 2 / (runs * p[0])).sum()) < critical
    expected = second.sum() * p[1]
    assert float(((second - expected) ** 2 / expected).sum()) < critical
    overlap = float(torch.minimum(p[0], q[0]).sum())
    assert accepted / runs == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / runs) ** 0.5)
