"""Hidden states of verifiers that vLLM cannot serve: computed by transformers, in this process, batch by batch.

Layer ids mean what they mean in vLLM: 0 is what enters the first decoder layer, l is what leaves the l-th one, and the
last one is taken before the final norm (transformers' own ``output_hidden_states`` gives it after). Hooks pick up the
layers that are wanted; no other layer's states are kept, and no logits are computed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speculators.config import RetrainConfig, ServingConfig
from speculators.data.prepare import Sample
from speculators.errors import CheckpointError, ConfigError
from speculators.hidden_states.format import EncodedStates, StateFormat, token_checksum
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import StagePlan
from speculators.progress import Progress
from speculators.store import Store
from speculators.verifier import Verifier

_TOKENS_PER_BATCH = 4096  # padding included; bounds the memory
_IDLE_FLUSH_S = 30.0  # on a CPU a batch takes long: do not make a shard of each


def compute_states(
    verifier: Verifier,
    config: RetrainConfig,
    plan: StagePlan,
    store: Store,
    samples: Sequence[Sample],
    last_from: Callable[[Sample], int],
    progress: Progress,
) -> None:
    """Compute the states of samples and write them into shards of the plan's folder.

    The verifier runs on ``serving.device`` in ``serving.dtype``. Shards that were written count, whatever happens
    later: the next run is given only the samples that are still missing.

    Args:
        plan: The extraction; says which states, and where they go.
        samples: Of two tokens at least.
        last_from: First row of a sample whose last layer is kept.

    Raises:
        ConfigError: There is no GPU where one was asked for, or too little of its memory.
        CheckpointError: transformers cannot load the verifier, or its decoder is not built as others are.
        StoreError: The store cannot be written.
    """
    try:
        _compute(verifier, config, plan, store, samples, last_from, progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{verifier.source} in serving.dtype {config.serving.dtype} and batches of {_TOKENS_PER_BATCH} tokens (or"
            " of one longer sample) need more memory than the GPU has free. Take a smaller dtype, shorten samples by"
            f" prepare.max_length, or use a larger GPU ({str(error).splitlines()[0]})"
        ) from error
    finally:
        progress.finish()
        # Training's processes want the GPU that this one goes on to hold.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@torch.inference_mode()
def _compute(
    verifier: Verifier,
    config: RetrainConfig,
    plan: StagePlan,
    store: Store,
    samples: Sequence[Sample],
    last_from: Callable[[Sample], int],
    progress: Progress,
) -> None:
    state_format = StateFormat.from_json(plan.determinants["states"])
    decoder = Decoder.load(verifier, config.serving, config.verifier.trust_remote_code)
    progress.start("extract", sum(len(sample.token_ids) - 1 for sample in samples), "tokens")
    done, started = 0, time.monotonic()
    shard_bytes = config.extract.shard_mib << 20
    with ShardWriter(store, plan.directory, state_format, shard_bytes, idle_flush_s=_IDLE_FLUSH_S) as writer:
        for batch in batches(samples):
            rows = [sample.token_ids[:-1] for sample in batch]
            for sample, states in zip(batch, decoder.states(rows, state_format.layer_ids), strict=True):
                encoded = _on_cpu(state_format.encode(states, last_from(sample)))
                writer.add(sample.sample_id, encoded, token_checksum(sample.token_ids[:-1]))
                done += len(states)
            progress.update(done, tokens_per_s=round(done / (time.monotonic() - started), 1))


def batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples of similar length together, within the budget of tokens; one that exceeds it comes by itself.

    The longest come first: what does not fit into the memory fails at once.
    """
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.token_ids)):
        if batch and (len(batch) + 1) * (len(batch[0].token_ids) - 1) > _TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _on_cpu(states: EncodedStates) -> EncodedStates:
    return replace(states, tensors={name: tensor.cpu() for name, tensor in states.tensors.items()})


@dataclass(frozen=True)
class Decoder:
    """The text decoder of a verifier, without its head.

    Attributes:
        module: Takes ``input_ids`` and ``attention_mask``.
        layers: Its decoder layers, in their order.
        hidden_size: H.
    """

    module: nn.Module
    layers: nn.ModuleList
    hidden_size: int

    @classmethod
    def load(cls, verifier: Verifier, serving: ServingConfig, trust_remote_code: bool) -> Decoder:
        """Load a verifier and find its decoder.

        Raises:
            ConfigError: There is no GPU where one was asked for.
            CheckpointError: transformers cannot load the verifier, or its layers are not found.
        """
        if serving.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "serving.device is cuda, but torch finds no GPU in the pipeline's environment. Set serving.device: cpu,"
                " or run on a machine with a GPU and its driver."
            )
        try:
            model, info = _auto_class(verifier, trust_remote_code).from_pretrained(
                verifier.path,
                dtype=serving.dtype,
                device_map=serving.device,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a repository's own code may raise anything
            raise CheckpointError(
                f"transformers {version('transformers')} cannot load {verifier.path}. It has to know the architecture,"
                f" or to be allowed to run the repository's own code (verifier.trust_remote_code). It says: {error}"
            ) from error
        if missing := sorted(info["missing_keys"]):
            # transformers would go on with random numbers in their place.
            raise CheckpointError(
                f"{verifier.path} lacks {len(missing)} of the weights that transformers'"
                f" {type(model).__name__} has, such as {missing[0]}. Its files are incomplete, or its config.json is of"
                " another model."
            )
        return cls.of(model, verifier)

    @classmethod
    def of(cls, model: Any, verifier: Verifier) -> Decoder:
        """The decoder of a model that transformers has loaded: of the text part, where it has several.

        Raises:
            CheckpointError: There is no list of as many layers as the verifier has.
        """
        from transformers import PreTrainedModel

        text = model.get_decoder()  # without the towers of other modalities
        lists = [
            (name, child)
            for name, child in text.named_modules()
            if isinstance(child, nn.ModuleList) and len(child) == verifier.num_layers
        ]
        if not lists:
            raise CheckpointError(
                f"{verifier.path}: transformers' {type(text).__name__} has no list of the {verifier.num_layers} decoder"
                " layers that config.json speaks of, so transformers cannot extract this verifier's hidden states."
            )
        # A layer may hold lists of its own (experts), which lie deeper.
        name, layers = min(lists, key=lambda found: found[0].count("."))
        parts = name.split(".")
        around = [text.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        # The innermost model around the layers: a head, if the outer ones have one, would fill the memory with logits.
        module = next((part for part in reversed(around) if isinstance(part, PreTrainedModel)), text)
        return cls(module, layers, verifier.hidden_size)

    def states(self, rows: Sequence[np.ndarray], layer_ids: Sequence[int]) -> Iterator[Tensor]:
        """Run over a batch of sequences.

        Args:
            rows: Token ids [n] of each, of any lengths.
            layer_ids: Layers in the order that is wanted; any may come twice.

        Returns:
            States [n, layers, H] of each sequence, on the model's device.

        Raises:
            CheckpointError: What a layer hands on is not one state for each token.
        """
        width = max(len(row) for row in rows)
        token_ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            # Padding on the right: no token sees it, and every token keeps its position.
            token_ids[place, : len(row)] = torch.from_numpy(row)
            mask[place, : len(row)] = 1
        device = next(self.module.parameters()).device
        with _caught(self.layers, layer_ids) as caught:
            self.module(input_ids=token_ids.to(device), attention_mask=mask.to(device), use_cache=False)
        for layer_id in layer_ids:
            if caught[layer_id].shape != (len(rows), width, self.hidden_size):
                raise CheckpointError(
                    f"{type(self.module).__name__}: layer {layer_id} has states of shape"
                    f" {list(caught[layer_id].shape)} where {[len(rows), width, self.hidden_size]} was expected, so"
                    " transformers cannot extract this verifier's hidden states."
                )
        return (
            torch.stack([caught[layer_id][place, : len(row)] for layer_id in layer_ids], dim=1)
            for place, row in enumerate(rows)
        )


@contextmanager
def _caught(layers: nn.ModuleList, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """The states of these layers, once a forward pass has ended; the layers are left without hooks."""
    states: dict[int, Tensor] = {}

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[0] = args[0] if args else kwargs["hidden_states"]

    def leave(layer_id: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [
        # Not the embedding's own output: some models scale it or add positions before the first layer.
        layers[layer_id - 1].register_forward_hook(leave(layer_id))
        if layer_id
        else layers[0].register_forward_pre_hook(enter, with_kwargs=True)
        for layer_id in set(layer_ids)
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _auto_class(verifier: Verifier, trust_remote_code: bool) -> Any:
    """The class of transformers that loads the verifier: the language model alone where there is one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(verifier.path, trust_remote_code=trust_remote_code)
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    return AutoModelForMultimodalLM
