"""States by transformers: those of ``output_hidden_states``, whatever the family and the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from speculators.config import RetrainConfig
from speculators.data.prepare import Sample
from speculators.errors import CheckpointError, ConfigError, StoreError
from speculators.hidden_states import transformers_extractor as module
from speculators.hidden_states.format import SHARDS, IndexEntry, StateFormat
from speculators.hidden_states.reader import HiddenStateReader
from speculators.manifest import Stage, StagePlan
from speculators.progress import Progress
from speculators.store import Store
from speculators.verifier import Verifier, read_verifier
from tests.hidden_states.test_shards import sidecars

VOCAB, HIDDEN, LAYERS = 60, 24, 4
LAYER_IDS = [3, 0, 1, 3, LAYERS]
LENGTHS = [2, 31, 3, 17, 17, 8, 40, 2, 23, 12]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 36,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {"num_experts": LAYERS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Sliding windows of fewer tokens than samples have.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=8, sliding_window_pattern=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=LAYERS, num_experts_per_tok=2, sliding_window=8),
    "llama4": lambda: Llama4TextConfig(**SIZES, num_local_experts=2, intermediate_size_mlp=36),
    "opt": lambda: OPTConfig(**SIZES, ffn_dim=36, word_embed_proj_dim=HIDDEN),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={
            **SIZES,
            "head_dim": HIDDEN // 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
        },
        # As many layers as the text model has: they must not be taken for its own.
        vision_config={
            "depth": LAYERS,
            "hidden_size": 16,
            "out_hidden_size": HIDDEN,
            "num_heads": 2,
            "intermediate_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
}


def write_model(folder: Path, config: PreTrainedConfig) -> Verifier:
    """A verifier of a family, with random weights, also in its norms and biases."""
    torch.manual_seed(0)
    automatic = AutoModelForMultimodalLM if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = automatic.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return read_verifier(folder, str(folder), None, folder.parent / "cache")


def make_samples(lengths: list[int]) -> list[Sample]:
    chance = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        tokens = chance.integers(1, VOCAB, length, dtype=np.int32)
        prompt = max(1, length // 3)
        samples.append(Sample(f"p{number}/0", f"p{number}", "train", tokens, np.arange(length) >= prompt, prompt))
    return samples


def first_row(sample: Sample) -> int:
    return sample.prompt_length - 1


def plan_of(layer_ids: list[int], dtype: str = "float32") -> StagePlan:
    states = StateFormat(tuple(layer_ids), dtype, dtype)  # type: ignore[arg-type]
    return StagePlan(Stage.EXTRACT, {"states": states.to_json()})


def compute(
    verifier: Verifier, plan: StagePlan, store: Store, samples: list[Sample], progress: Progress | None = None
) -> None:
    config = RetrainConfig()
    module.compute_states(verifier, config, plan, store, samples, first_row, progress or Progress())


def reader_of(store: Store, plan: StagePlan) -> HiddenStateReader:
    """Reads all shards that are there; no sample may be there twice."""
    entries = [IndexEntry(shard=s.shard, **entry.__dict__) for s in sidecars(store, plan) for entry in s.samples]
    assert len({entry.sample_id for entry in entries}) == len(entries)
    states = StateFormat.from_json(plan.determinants["states"])
    return HiddenStateReader(store, plan.directory, states, HIDDEN, entries)


@torch.no_grad()
def expected_states(model: Any, sample: Sample) -> Tensor:
    """float32 [n - 1, layers + 1, H]: what transformers itself says of one sample; the last after the final norm."""
    outputs = model(torch.from_numpy(sample.token_ids[:-1]).long()[None], output_hidden_states=True)
    return torch.stack([states[0] for states in outputs.hidden_states], dim=1)


def final_norm(model: Any) -> nn.Module:
    decoder = model.get_decoder()
    found = decoder if hasattr(decoder, "layers") else decoder.model
    return found.norm if hasattr(found, "norm") else found.final_layer_norm


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return FAMILIES[request.param]()


@pytest.fixture
def llama(tmp_path: Path) -> Verifier:
    return write_model(tmp_path / "llama", FAMILIES["llama"]())


def test_states_are_those_of_transformers(
    tmp_path: Path, store: Store, family: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several padded samples, of one that exceeds the budget, and of two tokens, of every family."""
    verifier, samples, plan = write_model(tmp_path / "model", family), make_samples(LENGTHS), plan_of(LAYER_IDS)
    monkeypatch.setattr(module, "_TOKENS_PER_BATCH", 36)
    sizes = [[len(sample.token_ids) for sample in batch] for batch in module.batches(samples)]
    assert sizes == [[40], [31], [23], [17, 17], [12, 8, 3], [2, 2]]
    compute(verifier, plan, store, samples)

    reader = reader_of(store, plan)
    assert sorted(reader.sample_ids) == sorted(sample.sample_id for sample in samples)
    automatic = AutoModelForMultimodalLM if hasattr(family, "vision_config") else AutoModelForCausalLM
    model = automatic.from_pretrained(verifier.path, dtype=torch.float32)
    norm = final_norm(model)
    for sample in samples:
        reader.check_tokens(sample.sample_id, sample.token_ids.tolist())
        found, expected = reader.read(sample.sample_id), expected_states(model, sample)
        assert found.shape == (len(sample.token_ids) - 1, len(LAYER_IDS), HIDDEN)
        assert relative_error(found[:, :-1], expected[:, LAYER_IDS[:-1]]) < 1e-5
        first = first_row(sample)
        assert not found[:first, -1].any()
        with torch.no_grad():
            last = norm(found[first:, -1])
        assert relative_error(last, expected[first:, LAYERS]) < 1e-5
        assert relative_error(found[first:, -1], expected[first:, LAYERS]) > 1e-2


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["llama", "llama4", "qwen2_5_vl"])
def test_no_logits_are_computed(tmp_path: Path, store: Store, name: str) -> None:
    verifier, widths = write_model(tmp_path / "model", FAMILIES[name]()), set()

    def note(_: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            widths.add(output.shape[-1])

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        compute(verifier, plan_of(LAYER_IDS), store, make_samples([5, 9]))
    finally:
        hook.remove()
    assert HIDDEN in widths
    assert VOCAB not in widths


def test_the_layers_are_left_without_hooks(llama: Verifier) -> None:
    decoder = module.Decoder.load(llama, RetrainConfig().serving, trust_remote_code=False)
    list(decoder.states([np.arange(3, dtype=np.int32)], LAYER_IDS))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in decoder.layers)


def test_float8_is_off_by_half_its_step(llama: Verifier, store: Store) -> None:
    """2**-4 for three bits of mantissa; below the smallest normal number the step is the same for all."""
    samples, exact, small = make_samples(LENGTHS), plan_of(LAYER_IDS), plan_of(LAYER_IDS, "float8_e4m3")
    for plan in (exact, small):
        compute(llama, plan, store, samples)
    for sample in samples:
        true, found = (reader_of(store, plan).read(sample.sample_id) for plan in (exact, small))
        floor = true.abs().amax(dim=-1, keepdim=True) / 448 * 2**-10
        assert bool(((found - true).abs() <= true.abs() * 2**-4 * 1.001 + floor).all())
        assert not torch.equal(found, true)


def test_the_dtype_is_the_configured_one(llama: Verifier, store: Store) -> None:
    samples, plan = make_samples([9, 4]), plan_of(LAYER_IDS)
    config = RetrainConfig.model_validate({"serving": {"dtype": "bfloat16"}})
    module.compute_states(llama, config, plan, store, samples, first_row, Progress())
    for sample in samples:
        found = reader_of(store, plan).read(sample.sample_id)
        assert torch.equal(found, found.bfloat16().float())


def test_a_head_without_auxiliary_layers_gets_every_row_of_the_last(llama: Verifier, store: Store) -> None:
    [sample], both, alone = make_samples([9]), plan_of([1, LAYERS]), plan_of([LAYERS])
    for plan in (both, alone):
        module.compute_states(llama, RetrainConfig(), plan, store, [sample], lambda sample: 0, Progress())
    [sidecar] = sidecars(store, alone)
    tensors = load_file(store.full_path(alone.path(sidecar.shard)))
    assert tensors["0.aux"].numel() == 0
    assert torch.equal(tensors["0.last"], reader_of(store, both).read(sample.sample_id)[:, -1])


class Shown(Progress):
    """Notes what is shown, and may end the run as Ctrl-C would."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.calls, self.done = stop_at, [], [0]

    def start(self, description: str, total: int, unit: str) -> None:
        self.calls.append((description, total, unit))

    def update(self, done: int, total: int | None = None, **figures: Any) -> None:
        assert figures["tokens_per_s"] > 0
        self.done.append(done)
        if len(self.done) - 1 == self.stop_at:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.calls.append("finish")


def test_an_interrupted_run_goes_on(llama: Verifier, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed before the interruption is in the store; the next run computes the rest, and only that."""
    monkeypatch.setattr(module, "_TOKENS_PER_BATCH", 36)
    samples, plan = make_samples(LENGTHS), plan_of(LAYER_IDS)
    shown = Shown(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        compute(llama, plan, store, samples, shown)
    there = reader_of(store, plan).sample_ids
    assert sorted(len(sample.token_ids) for sample in samples if sample.sample_id in there) == [23, 31, 40]
    assert shown.done == [0, 39, 69, 91]

    shown = Shown()
    missing = [sample for sample in samples if sample.sample_id not in there]
    compute(llama, plan, store, missing, shown)
    assert sorted(reader_of(store, plan).sample_ids) == sorted(sample.sample_id for sample in samples)
    total = sum(len(sample.token_ids) - 1 for sample in missing)
    assert shown.done[-1] == total
    assert shown.calls == [("extract", total, "tokens"), "finish"]


def test_a_store_that_cannot_be_written_is_an_error(llama: Verifier, store: Store) -> None:
    plan = plan_of(LAYER_IDS)
    store.write_bytes(plan.path(SHARDS), b"a file where the folder should be")
    with pytest.raises(StoreError, match=SHARDS):
        compute(llama, plan, store, make_samples(LENGTHS))


OWN_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own"

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        # As long as the list of layers.
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(config.num_hidden_layers))

    def forward(self, x):
        return x + self.mix(x.cumsum(dim=1)), "attention weights"

class Stack(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return x

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack = Stack(config)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return (self.stack(self.embed(input_ids) * 3),)

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        self.transformer = OwnModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    """A verifier whose repository brings its own code: other names, tuples, the layers in a module of their own."""
    for place in ("dynamic_module_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{place}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": "own", "auto_map": classes}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    return read_verifier(folder, str(folder), None, tmp_path / "cache")


def test_a_repositorys_own_code(own_code: Verifier, store: Store) -> None:
    samples, plan = make_samples(LENGTHS), plan_of(LAYER_IDS)
    with pytest.raises(CheckpointError, match=r"verifier\.trust_remote_code"):
        compute(own_code, plan, store, samples)
    config = RetrainConfig.model_validate({"verifier": {"trust_remote_code": True}})
    module.compute_states(own_code, config, plan, store, samples, first_row, Progress())
    weights = load_file(own_code.path / "model.safetensors")
    for sample in samples:
        states = [3 * weights["transformer.embed.weight"][torch.from_numpy(sample.token_ids[:-1]).long()]]
        for layer in range(LAYERS):
            name, x = f"transformer.stack.blocks.{layer}.mix", states[-1]
            states.append(x + x.cumsum(dim=0) @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        expected = torch.stack([states[layer] for layer in LAYER_IDS], dim=1)
        expected[: first_row(sample), -1] = 0
        assert relative_error(reader_of(store, plan).read(sample.sample_id), expected) < 1e-5


def test_missing_weights_are_refused(llama: Verifier, store: Store) -> None:
    """transformers would initialise them at random."""
    file = llama.path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of the weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        compute(llama, plan_of(LAYER_IDS), store, make_samples([5]))


def test_weights_of_other_shapes_are_refused(llama: Verifier, store: Store) -> None:
    change_config(llama, intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"transformers \S+ cannot load .*llama"):
        compute(llama, plan_of(LAYER_IDS), store, make_samples([5]))


def test_an_unknown_architecture_is_refused(llama: Verifier, store: Store) -> None:
    change_config(llama, model_type="nobody_knows")
    with pytest.raises(CheckpointError, match=r"cannot load .* has to know the architecture.*nobody_knows"):
        compute(llama, plan_of(LAYER_IDS), store, make_samples([5]))


def change_config(verifier: Verifier, **changes: Any) -> None:
    file = verifier.path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_layers_that_are_not_found_are_an_error(llama: Verifier) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama.path)
    other = replace(llama, config={**llama.config, "num_hidden_layers": LAYERS + 1})
    with pytest.raises(CheckpointError, match=r"LlamaModel has no list of the 5 decoder layers"):
        module.Decoder.of(model, other)


def test_states_of_an_odd_shape_are_an_error(llama: Verifier) -> None:
    """Some architectures hand several streams of states from layer to layer."""
    model = AutoModelForCausalLM.from_pretrained(llama.path)
    decoder = module.Decoder(model.model, model.model.layers, HIDDEN // 2)
    with pytest.raises(CheckpointError, match=r"layer 1 has states of shape \[1, 3, 24\] where \[1, 3, 12\]"):
        decoder.states([np.arange(3, dtype=np.int32)], [1])


def test_a_gpu_that_is_not_there_is_said(llama: Verifier, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = RetrainConfig.model_validate({"serving": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"serving\.device is cuda, but torch finds no GPU"):
        module.compute_states(llama, config, plan_of(LAYER_IDS), store, make_samples([5]), first_row, Progress())


def test_too_little_gpu_memory_is_said(llama: Verifier, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore")

    monkeypatch.setattr(module.Decoder, "states", fail)
    with pytest.raises(ConfigError, match=r"need more memory .* prepare\.max_length.*\(CUDA out of memory\. Tried"):
        compute(llama, plan_of(LAYER_IDS), store, make_samples([5]))
