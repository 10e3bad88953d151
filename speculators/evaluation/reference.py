"""The reference decoder: draft and verify in plain torch, step for step what vLLM's proposers do.

vLLM's acceptance on the same prompts must agree with it. Where it does not, the drafter's checkpoint means something
else to vLLM than it meant in training (layer ids, shifts, RoPE, vocabulary mapping).

What is reproduced (files of vLLM 0.32):

- ``v1/spec_decode/llm_base_proposer.py``: the drafter's input at position t is the embedding of token t+1 and the
  verifier's fused states at t. After a verification the accepted positions are fed again with the verifier's states,
  which overwrites what the drafter's own states left in its cache. Draft step j > 0 runs at the position after, with
  the draft token's embedding and the drafter's own state.
- ``v1/core/sched/scheduler.py``: a draft counts when it is verified; all its accepted tokens count, also those behind
  a stop token or ``max_tokens``. A draft proposed by a request's last step is never verified and does not count.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.checkpoints.speculators_format import load_drafter
from speculators.data.prepare import EvaluationPrompt
from speculators.evaluation.acceptance import Acceptance
from speculators.models.drafter import BEST, Drafter, Proposer, SampledChoice
from speculators.progress import Progress
from speculators.verifier import Verifier

_SAVE_EVERY_S = 20.0
_CHECKED_AT_ONCE = 128  # bounds the logits in memory


@dataclass(frozen=True)
class ReferenceResult:
    """What the reference decoder generated for one prompt.

    Attributes:
        token_ids: Generated tokens, stop token included.
        drafts: Verification steps.
        accepted: Accepted draft tokens over all steps.
        accepted_per_position: How often draft token k was accepted, k from 0.
    """

    token_ids: list[int]
    drafts: int
    accepted: int
    accepted_per_position: list[int]

    @property
    def acceptance(self) -> Acceptance:
        """The counts in the form that vLLM's have."""
        width = len(self.accepted_per_position)
        return Acceptance(self.drafts, self.drafts * width, self.accepted, tuple(self.accepted_per_position))


@torch.inference_mode()
def reference_decode(
    verifier_model: nn.Module,
    proposer: Proposer,
    layer_ids: Sequence[int],
    prompt_token_ids: Sequence[int],
    num_speculative_tokens: int,
    max_tokens: int,
    stop_ids: Collection[int],
    expected: Sequence[int] = (),
) -> ReferenceResult:
    """Generate greedily with draft and verification.

    Args:
        verifier_model: A transformers causal LM in eval mode.
        proposer: A new one, on the verifier's device.
        layer_ids: Verifier layers whose states it reads.
        prompt_token_ids: At least one token.
        num_speculative_tokens: Draft length K.
        max_tokens: Longest answer in tokens.
        stop_ids: Tokens that end the answer.
        expected: A likely answer, such as vLLM's. The verifier checks it like one long draft, in few passes, and goes
            on by itself from where it disagrees: the result is the same, but on a CPU it comes several times sooner.
    """
    with _Verifier.attached(verifier_model, layer_ids) as verifier:
        verifier.start(prompt_token_ids)
        verifier.check(expected)
        chosen = verifier.chosen
        emitted, drafts, per_position = 1, 0, [0] * num_speculative_tokens
        shifted = [*prompt_token_ids[1:], chosen[0]]
        while emitted < max_tokens and not set(stop_ids) & set(chosen[:emitted]):
            draft = proposer.propose(verifier.states[proposer.length : proposer.length + len(shifted)], shifted)
            known = len(chosen) - emitted
            if _agreeing(draft, chosen[emitted:]) == known:
                verifier.extend(draft[known:])
            accepted = _agreeing(draft, chosen[emitted:])
            for position in range(accepted):
                per_position[position] += 1
            drafts += 1
            shifted = chosen[emitted : emitted + accepted + 1]
            emitted += accepted + 1
    return ReferenceResult(_cut(chosen[:emitted], max_tokens, stop_ids), drafts, sum(per_position), per_position)


@torch.inference_mode()
def reference_sample(
    verifier_model: nn.Module,
    drafter: Drafter,
    kept_ids: Tensor | None,
    prompt_token_ids: Sequence[int],
    num_speculative_tokens: int,
    max_tokens: int,
    stop_ids: Collection[int],
    temperature: float,
    generator: torch.Generator,
    sampled_drafts: bool = False,
) -> ReferenceResult:
    """Generate at a temperature with rejection sampling (arXiv 2211.17192, algorithm 1).

    A draft token x is accepted with probability ``min(1, p(x) / q(x))``, p being the verifier's and q the drafter's
    distribution; the first one that is not is replaced by one drawn from ``max(p - q, 0)``, normalised. So the answer
    is distributed as the verifier's own, whatever the drafter.

    Args:
        drafter: On the verifier's device, in eval mode.
        kept_ids: int64 [Vd], verifier ids of the draft vocabulary; None when it is the whole one.
        temperature: Above 0.
        generator: Makes every random choice; of the verifier's device.
        sampled_drafts: Draw drafts from q at this temperature. Else the drafter proposes its best tokens, q is 1 there,
            and a token is accepted with probability p(x): vLLM's default (``draft_sample_method``).

    Other arguments and the result: see :func:`reference_decode`.
    """
    vocabulary = drafter.config.vocab_size
    sampled = SampledChoice(vocabulary, temperature, generator) if sampled_drafts else None
    proposer = drafter.proposer(kept_ids, num_speculative_tokens, sampled or BEST)
    with _Verifier.attached(verifier_model, drafter.state_layer_ids) as verifier:
        logits, states = verifier.read(list(prompt_token_ids), keep=1)
        generated = [_draw((logits[0].float() / temperature).softmax(dim=-1), generator)]
        drafts, per_position = 0, [0] * num_speculative_tokens
        shifted = [*prompt_token_ids[1:], generated[0]]
        while len(generated) < max_tokens and not set(stop_ids) & set(generated):
            if sampled is not None:
                sampled.clear()
            draft = proposer.propose(states, shifted)
            logits, states = verifier.read([generated[-1], *draft], keep=len(draft) + 1)
            target = (logits.float() / temperature).softmax(dim=-1)
            if sampled is not None:
                proposed = torch.stack(sampled.distributions)
            else:
                proposed = F.one_hot(torch.tensor(draft, device=target.device), vocabulary).to(target.dtype)
            shifted = reject(draft, proposed, target, generator)
            for position in range(len(shifted) - 1):
                per_position[position] += 1
            verifier.forget(len(draft) + 1 - len(shifted))
            states = states[: len(shifted)]
            drafts += 1
            generated += shifted
    return ReferenceResult(_cut(generated, max_tokens, stop_ids), drafts, sum(per_position), per_position)


def reject(draft: Sequence[int], proposed: Tensor, target: Tensor, generator: torch.Generator) -> list[int]:
    """The accepted tokens of a draft, and the one that follows them (arXiv 2211.17192, algorithm 1).

    Args:
        draft: K tokens.
        proposed: [K, V], the distribution that each was drawn from.
        target: [K + 1, V], the verifier's distributions there and behind the draft.
        generator: Makes the random choices.
    """
    for position, token in enumerate(draft):
        p, q = target[position], proposed[position]
        if torch.rand((), generator=generator, device=p.device) * q[token] >= p[token]:
            return [*draft[:position], _draw((p - q).clamp(min=0), generator)]
    return [*draft, _draw(target[-1], generator)]


def _draw(weights: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def _cut(generated: list[int], max_tokens: int, stop_ids: Collection[int]) -> list[int]:
    """What remains of the generated tokens: up to the first stop token (included), at most ``max_tokens``."""
    for index, token in enumerate(generated[:max_tokens]):
        if token in stop_ids:
            return generated[: index + 1]
    return generated[:max_tokens]


class _Verifier:
    """The verifier with its KV cache; hooks pick up the states that the drafter needs, and no others.

    Attributes:
        chosen: Its greedy continuation of the prompt, as far as known.
        states: Auxiliary states [tokens, layers, H] of the prompt and all of ``chosen`` but the last token.
    """

    chosen: list[int]
    states: Tensor

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.model, self.layer_ids = model, layer_ids
        self.device = next(model.parameters()).device
        # Without a configuration, sliding-window layers too keep all keys (their mask still hides the old ones), so
        # that rejected tokens can be dropped.
        self.cache = DynamicCache()
        self.caught: dict[int, Tensor] = {}
        # transformers renamed the argument in 5.24.
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    @contextmanager
    def attached(cls, model: nn.Module, layer_ids: Sequence[int]) -> Iterator[_Verifier]:
        """A verifier with an empty cache, whose model is left without hooks afterwards.

        Args:
            layer_ids: Layer i's output is the input of decoder layer i counted from 0; 0 is the embedding's output, and
                the number of layers is the last one's, before the final norm.
        """
        verifier = cls(model, layer_ids)
        decoder = model.get_decoder()  # type: ignore[operator]
        readers = [*decoder.layers, decoder.norm]

        def catch(layer_id: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                verifier.caught[layer_id] = (args[0] if args else kwargs["hidden_states"])[0]

            return hook

        handles = [readers[i].register_forward_pre_hook(catch(i), with_kwargs=True) for i in layer_ids]
        try:
            yield verifier
        finally:
            for handle in handles:
                handle.remove()

    def start(self, prompt_token_ids: Sequence[int]) -> None:
        """Read the prompt and choose the first token."""
        logits, self.states = self.read(list(prompt_token_ids), keep=1)
        self.chosen = logits.argmax(dim=-1).tolist()

    def extend(self, guess: Sequence[int]) -> None:
        """Go on by one token at least, and by one more for each token of the guess that would be chosen as well."""
        logits, states = self.read([self.chosen[-1], *guess], keep=len(guess) + 1)
        choices = logits.argmax(dim=-1).tolist()
        right = _agreeing(guess, choices)
        self.forget(len(guess) - right)
        self.chosen += choices[: right + 1]
        self.states = torch.cat([self.states, states[: right + 1]])

    def check(self, expected: Sequence[int]) -> None:
        """Go on along a likely continuation, up to where the choice is another."""
        while len(self.chosen) < len(expected) and _agreeing(self.chosen, expected) == len(self.chosen):
            self.extend(expected[len(self.chosen) : len(self.chosen) + _CHECKED_AT_ONCE])

    def forget(self, tokens: int) -> None:
        """Drop that many tokens from the end of the cache."""
        if tokens:
            self.cache.crop(-tokens)

    def read(self, token_ids: list[int], keep: int) -> tuple[Tensor, Tensor]:
        """Run over tokens that follow those read so far.

        Returns:
            The logits [keep, V] after the last ``keep`` tokens, and the drafter's states [tokens, layers, H] of all.
        """
        start = self.cache.get_seq_length()
        positions = torch.arange(start, start + len(token_ids), device=self.device)
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_argument: self.cache},
        )
        states = torch.stack([self.caught[i] for i in self.layer_ids], dim=1)
        return output.logits[0], states


def stop_token_ids(verifier: Path, trust_remote_code: bool) -> set[int]:
    """Tokens that end an answer in vLLM: the tokenizer's, and generation_config.json's even with
    ``--generation-config vllm`` (``try_get_generation_config`` in vLLM's config/model.py)."""
    from transformers import AutoTokenizer, GenerationConfig

    found = {AutoTokenizer.from_pretrained(verifier, trust_remote_code=trust_remote_code).eos_token_id}
    if (verifier / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(verifier).eos_token_id
        found |= set(configured) if isinstance(configured, list) else {configured}
    return {int(token) for token in found if token is not None}


def decode_prompts(
    verifier: Verifier,
    trust_remote_code: bool,
    drafter_dir: Path,
    prompts: Sequence[EvaluationPrompt],
    limits: Mapping[str, int],
    expected: Mapping[str, Sequence[int]],
    num_speculative_tokens: int,
    device: str,
    progress: Progress,
    results: dict[str, ReferenceResult],
    save: Callable[[], None],
) -> None:
    """Decode prompts one by one and add to ``results``.

    Args:
        limits: Longest answer in tokens, by sample.
        expected: Likely answers by sample, see :func:`reference_decode`.
        device: ``cpu`` or ``cuda``.
        results: By sample; filled here.
        save: Called every few seconds and at the end, to keep ``results``.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        verifier.path, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    model.to(device).eval()
    drafter, mapping, _ = load_drafter(drafter_dir, verifier.path)
    drafter = drafter.to(device=device, dtype=torch.float32).eval()
    kept_ids = None if mapping is None else mapping.kept_ids
    stop_ids = stop_token_ids(verifier.path, trust_remote_code)
    progress.start("Reference decoder", len(prompts), "prompts")
    saved = time.monotonic()
    for done, prompt in enumerate(prompts, 1):
        results[prompt.sample_id] = reference_decode(
            model,
            drafter.proposer(kept_ids, num_speculative_tokens),
            drafter.state_layer_ids,
            prompt.prompt_token_ids.tolist(),
            num_speculative_tokens,
            limits[prompt.sample_id],
            stop_ids,
            expected[prompt.sample_id],
        )
        length = sum((result.acceptance for result in results.values()), Acceptance()).length
        progress.update(done, acceptance_length=round(length, 3))
        if time.monotonic() - saved > _SAVE_EVERY_S:
            save()
            saved = time.monotonic()
    save()
    progress.finish()
