"""The reference decoder: greedy draft-and-verify in plain torch, step for step what vLLM's EAGLE proposer does.

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

from speculators.checkpoints.speculators_format import load_drafter
from speculators.data.prepare import EvaluationPrompt
from speculators.data.vocabulary import VocabMapping
from speculators.evaluation.acceptance import Acceptance
from speculators.models.eagle3 import Eagle3Drafter
from speculators.progress import Progress
from speculators.verifier import Verifier

_SAVE_EVERY_S = 20.0


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
    drafter: Eagle3Drafter,
    mapping: VocabMapping | None,
    prompt_token_ids: Sequence[int],
    num_speculative_tokens: int,
    max_tokens: int,
    stop_ids: Collection[int],
) -> ReferenceResult:
    """Generate greedily with draft and verification.

    Args:
        verifier_model: A transformers causal LM in eval mode.
        drafter: In eval mode, on the verifier's device.
        mapping: Draft vocabulary; None when the drafter has the verifier's.
        prompt_token_ids: At least one token.
        num_speculative_tokens: Draft length K.
        max_tokens: Longest answer in tokens.
        stop_ids: Tokens that end the answer.
    """
    proposer = _Proposer(drafter, mapping, num_speculative_tokens)
    with _Verifier.attached(verifier_model, drafter.config.aux_layer_ids) as verifier:
        chosen, states = verifier.forward(list(prompt_token_ids), keep=1)
        generated = list(chosen)
        shifted = [*prompt_token_ids[1:], *chosen]
        drafts, per_position = 0, [0] * num_speculative_tokens
        while len(generated) < max_tokens and not set(stop_ids) & set(chosen):
            draft = proposer.propose(states, shifted)
            chosen, states = verifier.forward([generated[-1], *draft], keep=num_speculative_tokens + 1)
            accepted = 0
            while accepted < len(draft) and draft[accepted] == chosen[accepted]:
                per_position[accepted] += 1
                accepted += 1
            drafts += 1
            verifier.drop(len(draft) - accepted)
            chosen, states = chosen[: accepted + 1], states[: accepted + 1]
            generated += chosen
            shifted = chosen
    return ReferenceResult(_cut(generated, max_tokens, stop_ids), drafts, sum(per_position), per_position)


def _cut(generated: list[int], max_tokens: int, stop_ids: Collection[int]) -> list[int]:
    """What remains of the generated tokens: up to the first stop token (included), at most ``max_tokens``."""
    for index, token in enumerate(generated[:max_tokens]):
        if token in stop_ids:
            return generated[: index + 1]
    return generated[:max_tokens]


class _Proposer:
    """The drafter with its KV cache, which holds the verified positions between two proposals."""

    def __init__(self, drafter: Eagle3Drafter, mapping: VocabMapping | None, num_speculative_tokens: int) -> None:
        self.drafter = drafter
        self.device = drafter.lm_head.weight.device
        self.kept_ids = None if mapping is None else mapping.kept_ids.to(self.device)
        self.num_speculative_tokens = num_speculative_tokens
        self.cache = drafter.new_cache()
        self.length = 0

    def propose(self, states: Tensor, shifted: Sequence[int]) -> list[int]:
        """Draft K tokens.

        Args:
            states: The verifier's auxiliary states [n, layers, H] at the positions verified since the last proposal.
            shifted: For each of these positions, the token after it.
        """
        features = self.drafter.fuse(states.flatten(1))
        hidden, features = self._decode(features, shifted, self.length)
        self.length += len(shifted)
        draft = [self._best(hidden)]
        for step in range(self.num_speculative_tokens - 1):
            hidden, features = self._decode(features[-1:], draft[-1:], self.length + step)
            draft.append(self._best(hidden))
        self.cache.truncate(self.length)
        return draft

    def _decode(self, features: Tensor, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + len(token_ids), device=self.device)
        tokens = torch.tensor([list(token_ids)], device=self.device)
        hidden, features = self.drafter.decode(features[None], tokens, positions[None], self.cache)
        return hidden[0], features[0]

    def _best(self, hidden: Tensor) -> int:
        best = self.drafter.logits(hidden[-1]).argmax()
        return int(best if self.kept_ids is None else self.kept_ids[best])


class _Verifier:
    """The verifier with its KV cache; hooks pick up the states that the drafter needs, and no others."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.model, self.layer_ids = model, layer_ids
        self.device = next(model.parameters()).device
        # Without a configuration, sliding-window layers too keep all keys (their mask still hides the old ones), so
        # that rejected tokens can be dropped.
        self.cache = DynamicCache()
        self.length = 0
        self.states: dict[int, Tensor] = {}
        # transformers renamed the argument in 5.24.
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    @contextmanager
    def attached(cls, model: nn.Module, layer_ids: Sequence[int]) -> Iterator[_Verifier]:
        """A verifier with an empty cache, whose model is left without hooks afterwards.

        Args:
            layer_ids: Layer i's output is the input of decoder layer i counted from 0; 0 is the embedding's output.
        """
        verifier = cls(model, layer_ids)
        layers = model.get_decoder().layers  # type: ignore[operator]

        def keep(layer_id: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                verifier.states[layer_id] = (args[0] if args else kwargs["hidden_states"])[0]

            return hook

        handles = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in layer_ids]
        try:
            yield verifier
        finally:
            for handle in handles:
                handle.remove()

    def forward(self, token_ids: list[int], keep: int) -> tuple[list[int], Tensor]:
        """Run over new tokens.

        Args:
            token_ids: Tokens that follow those in the cache.
            keep: How many of the last positions' choices are wanted.

        Returns:
            The verifier's choices after the last ``keep`` tokens, and the auxiliary states [tokens, layers, H] of all.
        """
        positions = torch.arange(self.length, self.length + len(token_ids), device=self.device)
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_argument: self.cache},
        )
        self.length += len(token_ids)
        states = torch.stack([self.states[i] for i in self.layer_ids], dim=1)
        return output.logits[0].argmax(dim=-1).tolist(), states

    def drop(self, count: int) -> None:
        """Take the last ``count`` tokens back out of the cache."""
        if count:
            self.cache.crop(-count)
            self.length -= count


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
    num_speculative_tokens: int,
    device: str,
    progress: Progress,
    results: dict[str, ReferenceResult],
    save: Callable[[], None],
) -> None:
    """Decode prompts one by one and add to ``results``.

    Args:
        limits: Longest answer in tokens, by sample.
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
    stop_ids = stop_token_ids(verifier.path, trust_remote_code)
    progress.start("Reference decoder", len(prompts), "prompts")
    saved = time.monotonic()
    for done, prompt in enumerate(prompts, 1):
        results[prompt.sample_id] = reference_decode(
            model,
            drafter,
            mapping,
            prompt.prompt_token_ids.tolist(),
            num_speculative_tokens,
            limits[prompt.sample_id],
            stop_ids,
        )
        length = sum((result.acceptance for result in results.values()), Acceptance()).length
        progress.update(done, acceptance_length=round(length, 3))
        if time.monotonic() - saved > _SAVE_EVERY_S:
            save()
            saved = time.monotonic()
    save()
    progress.finish()
