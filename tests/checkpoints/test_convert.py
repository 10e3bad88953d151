"""Drafters of research code into the speculators format and back."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.checkpoints.convert import convert, convert_back
from speculators.checkpoints.speculators_format import load_drafter, save_drafter, validate_drafter
from speculators.errors import CheckpointError
from speculators.models.eagle3 import Eagle3Drafter
from speculators.verifier import Verifier
from tests.models.tiny import HIDDEN, LAYERS, VOCAB, head_tensors, make_drafter, make_mapping, write_verifier

INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 36, 4, 2, 8, 16
BLOCK, MASK_TOKEN = 6, 39
LAYER_CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}
# As SafeAILab writes it: nothing tells of EAGLE-3 but draft_vocab_size, and of RoPE there is no key at all.
EAGLE3_CONFIG = {
    **LAYER_CONFIG,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
}
DFLASH_CONFIG = {
    **LAYER_CONFIG,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "rope_theta": 1000000,
    "block_size": BLOCK,
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": LAYERS,
    "use_sliding_window": False,
    "dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": MASK_TOKEN},
}

Tensors = dict[str, Tensor]
STORAGES = ["safetensors", "bin", "sharded safetensors", "sharded bin"]


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) * 0.3 for name, shape in shapes.items()}


def layer_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes that both methods' layers have; attention reads ``width`` features."""
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle3_tensors(dtype: torch.dtype = torch.float32) -> Tensors:
    shapes = {
        **layer_shapes("midlayer.", 2 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    mapping = make_mapping()
    return {**random_tensors(shapes, dtype), "d2t": mapping.d2t, "t2d": mapping.t2d}


def dflash_tensors(dtype: torch.dtype = torch.float32) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    for layer in ("layers.0.", "layers.1."):
        shapes |= layer_shapes(layer, HIDDEN)
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    return random_tensors(shapes, dtype)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, storage: str = "safetensors") -> Path:
    """A research checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    kind = storage.split()[-1]
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    store: Callable[[Tensors, Path], None] = save_file if kind == "safetensors" else torch.save
    if storage == kind:
        store(tensors, folder / f"{stem}.{suffix}")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"{stem}-{shard:05}-of-00002.{suffix}"
        store({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def tiny(tmp_path: Path) -> Verifier:
    return write_verifier(tmp_path / "verifier")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("with_embeddings", [False, True])
@pytest.mark.parametrize("with_t2d", [False, True])
def test_eagle3(storage: str, with_embeddings: bool, with_t2d: bool, tiny: Verifier, tmp_path: Path) -> None:
    tensors = eagle3_tensors(torch.bfloat16)
    expected = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if with_embeddings:
        tensors["embed_tokens.weight"] = head_tensors()["model.embed_tokens.weight"].bfloat16()
    if not with_t2d:
        del tensors["t2d"]
    source = write(tmp_path / "research", EAGLE3_CONFIG, tensors, storage)
    report = convert(source, tmp_path / "new" / "drafter", tiny)

    config, found = read(tmp_path / "new" / "drafter")
    assert_same(found, expected)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["drafter"]
    assert report.method == "eagle3"
    assert report.used == {
        name: name.replace("midlayer.", "layers.0.") for name in tensors if name != "embed_tokens.weight"
    }
    assert list(report.dropped) == (["embed_tokens.weight"] if with_embeddings else [])
    assert any("t2d was missing" in note for note in report.notes) is not with_t2d
    assert config["speculators_model_type"] == "eagle3"
    assert config["dtype"] == config["transformer_layer_config"]["dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, LAYERS // 2, LAYERS - 3]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[key] for key in flags] == [False] * 4
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny.path)
    layer = config["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    same = LAYER_CONFIG.keys() - {"rope_scaling", "torch_dtype"}
    assert {key: layer[key] for key in same} == {key: LAYER_CONFIG[key] for key in same}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("block_size_in", ["top level", "dflash_config", "both"])
def test_dflash(storage: str, block_size_in: str, tiny: Verifier, tmp_path: Path) -> None:
    tensors = dflash_tensors()
    config = json.loads(json.dumps(DFLASH_CONFIG))
    if block_size_in != "top level":
        config["dflash_config"]["block_size"] = config["block_size"]
    if block_size_in == "dflash_config":
        del config["block_size"]
    extra = {
        "embed_tokens.weight": head_tensors()["model.embed_tokens.weight"],
        "lm_head.weight": head_tensors()["lm_head.weight"],
        "rotary_emb.inv_freq": torch.ones(4),
    }
    source = write(tmp_path / "research", config, {**tensors, **extra}, storage)
    report = convert(source, tmp_path / "drafter", tiny)

    described, found = read(tmp_path / "drafter")
    assert_same(found, tensors)
    assert report.used == {name: name for name in tensors}
    assert report.dropped.keys() == extra.keys()
    assert described["speculators_model_type"] == "dflash"
    assert described["aux_hidden_state_layer_ids"] == [2, 4, 7]
    assert (described["block_size"], described["mask_token_id"]) == (BLOCK, MASK_TOKEN)
    assert described["sample_from_anchor"] is False
    assert described["draft_vocab_size"] == VOCAB
    assert described["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == BLOCK - 1
    assert described["transformer_layer_config"]["model_type"] == "qwen3"
    assert described["transformer_layer_config"]["rope_theta"] == 1000000
    drafter, mapping, _ = load_drafter(tmp_path / "drafter")
    assert mapping is None
    assert torch.equal(drafter.lm_head.weight, head_tensors()["lm_head.weight"])


def test_dflash_with_a_reduced_vocabulary_keeps_its_lm_head(tiny: Verifier, tmp_path: Path) -> None:
    mapping = make_mapping()
    own = {"lm_head.weight": torch.randn(DRAFT_VOCAB, HIDDEN), "d2t": mapping.d2t, "t2d": mapping.t2d}
    tensors = dflash_tensors() | own
    config = {**DFLASH_CONFIG, "draft_vocab_size": DRAFT_VOCAB}
    convert(write(tmp_path / "research", config, tensors), tmp_path / "drafter", tiny)
    assert_same(read(tmp_path / "drafter")[1], tensors)
    with pytest.raises(CheckpointError, match="the draft vocabulary is reduced; the layout z-lab has the verifier's"):
        convert_back(tmp_path / "drafter", tmp_path / "back", "z-lab")


def test_whole_vocabulary_needs_no_mapping(tiny: Verifier, tmp_path: Path) -> None:
    tensors = eagle3_tensors() | {
        "lm_head.weight": torch.randn(VOCAB, HIDDEN),
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    source = write(tmp_path / "research", {**EAGLE3_CONFIG, "draft_vocab_size": VOCAB}, tensors)
    report = convert(source, tmp_path / "drafter", tiny)
    assert report.dropped.keys() == {"d2t", "t2d"}
    assert not {"d2t", "t2d"} & read(tmp_path / "drafter")[1].keys()


@pytest.mark.parametrize("layout", ["safeailab", "specforge"])
@pytest.mark.parametrize("storage", ["safetensors", "sharded bin"])
def test_eagle3_round_trip(layout: Any, storage: str, tiny: Verifier, tmp_path: Path) -> None:
    tensors = eagle3_tensors(torch.float16)
    convert(write(tmp_path / "research", EAGLE3_CONFIG, tensors, storage), tmp_path / "drafter", tiny)
    report = convert_back(tmp_path / "drafter", tmp_path / "back", layout)
    config, found = read(tmp_path / "back")
    assert_same(found, tensors)
    assert report.used["layers.0.mlp.up_proj.weight"] == "midlayer.mlp.up_proj.weight"
    assert len(report.used) == len(tensors)
    assert report.dropped == {}
    changed = {"architectures", "rope_scaling", "torch_dtype"}
    same = EAGLE3_CONFIG.keys() - changed
    assert {key: config[key] for key in same} == {key: EAGLE3_CONFIG[key] for key in same}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["torch_dtype"] == "float16"
    # SpecForge and SGLang count the outputs of decoder layers.
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert "target_hidden_size" not in config
    convert(tmp_path / "back", tmp_path / "again", tiny)
    assert read(tmp_path / "again")[0] == read(tmp_path / "drafter")[0]


def test_specforge_options_round_trip(tiny: Verifier, tmp_path: Path) -> None:
    options = {"fc_norm": True, "norm_output": True, "norm_before_fc": True}
    norms = {f"fc_norm.{i}.weight": torch.rand(HIDDEN) for i in range(3)} | {
        "input_norm.weight": torch.rand(3 * HIDDEN)
    }
    tensors = eagle3_tensors() | norms
    convert(write(tmp_path / "research", {**EAGLE3_CONFIG, **options}, tensors), tmp_path / "drafter", tiny)
    assert read(tmp_path / "drafter")[0].items() >= options.items()
    convert_back(tmp_path / "drafter", tmp_path / "back", "specforge")
    config, found = read(tmp_path / "back")
    assert_same(found, tensors)
    assert config.items() >= options.items()
    with pytest.raises(CheckpointError, match="norm_before_fc is true; the layout safeailab has no such norm"):
        convert_back(tmp_path / "drafter", tmp_path / "other", "safeailab")


def test_dflash_round_trip(tiny: Verifier, tmp_path: Path) -> None:
    tensors = dflash_tensors(torch.bfloat16)
    convert(write(tmp_path / "research", DFLASH_CONFIG, tensors), tmp_path / "drafter", tiny)
    report = convert_back(tmp_path / "drafter", tmp_path / "back", "z-lab")
    config, found = read(tmp_path / "back")
    assert_same(found, tensors)
    assert report.notes == []
    same = DFLASH_CONFIG.keys() - {"rope_scaling", "torch_dtype", "use_sliding_window"}
    assert {key: config[key] for key in same} == {key: DFLASH_CONFIG[key] for key in same}

    described = json.loads((tmp_path / "drafter" / "config.json").read_text())
    described["speculators_config"]["verifier"]["name_or_path"] = "owner/on-the-hub"
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(described))
    report = convert_back(tmp_path / "drafter", tmp_path / "elsewhere", "z-lab")
    assert "num_target_layers" not in read(tmp_path / "elsewhere")[0]
    assert "SGLang needs it" in report.notes[0]


def slow_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def slow_rope(x: Tensor, position: int) -> Tensor:
    out = x.clone()
    half = HEAD_DIM // 2
    for i in range(half):
        angle = position / 10000.0 ** (i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def slow_logits(w: Tensors, embedding: Tensor, states: Tensor, tokens: list[int]) -> Tensor:
    """Logits [n, Vd] of SafeAILab's drafter by definition: the residual is the features before their norm."""
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    logits = []
    for t, token in enumerate(tokens):
        features = w["fc.weight"] @ states[t].flatten()
        normed = slow_norm(embedding[token], w["midlayer.input_layernorm.weight"])
        x = torch.cat([normed, slow_norm(features, w["midlayer.hidden_norm.weight"])])
        q, k, v = (w[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        keys.append([slow_rope(head, t) for head in k.view(KV_HEADS, HEAD_DIM)])
        values.append(list(v.view(KV_HEADS, HEAD_DIM)))
        mixed = []
        for head, query in enumerate(q.view(HEADS, HEAD_DIM)):
            kv, turned = head // (HEADS // KV_HEADS), slow_rope(query, t)
            scores = torch.stack([turned @ keys[s][kv] for s in range(t + 1)]) / math.sqrt(HEAD_DIM)
            weights = scores.exp() / scores.exp().sum()
            mixed.append(sum(weights[s] * values[s][kv] for s in range(t + 1)))
        hidden = features + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = slow_norm(hidden, w["midlayer.post_attention_layernorm.weight"])
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        inner = gate * gate.sigmoid() * (w["midlayer.mlp.up_proj.weight"] @ x)
        hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ inner
        logits.append(w["lm_head.weight"] @ slow_norm(hidden, w["norm.weight"]))
    return torch.stack(logits)


def test_converted_eagle3_computes_what_the_research_code_does(tiny: Verifier, tmp_path: Path) -> None:
    tensors = eagle3_tensors(torch.float64)
    convert(write(tmp_path / "research", EAGLE3_CONFIG, tensors, "bin"), tmp_path / "drafter", tiny)
    drafter, mapping, _ = load_drafter(tmp_path / "drafter")
    assert isinstance(drafter, Eagle3Drafter)
    assert mapping is not None
    assert mapping.kept_ids.tolist() == [i + int(tensors["d2t"][i]) for i in range(DRAFT_VOCAB)]
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(7, 3, HIDDEN, generator=generator, dtype=torch.float64)
    tokens = [3, 39, 0, 8, 8, 21, 5]
    with torch.no_grad():
        features = drafter.fuse(states.flatten(1))[None]
        positions = torch.arange(len(tokens))[None]
        hidden, _ = drafter.decode(features, torch.tensor([tokens]), positions, drafter.new_cache())
        logits = drafter.lm_head(hidden)[0]
    expected = slow_logits(tensors, head_tensors()["model.embed_tokens.weight"].double(), states, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, [1, 3, 6]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, [2, 4, 7]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}}, [2, 3, 6]),
    ],
    ids=["default", "vLLM", "outputs", "as they are"],
)
def test_auxiliary_layers(keys: dict[str, Any], expected: list[int], tiny: Verifier, tmp_path: Path) -> None:
    source = write(tmp_path / "research", {**EAGLE3_CONFIG, **keys}, eagle3_tensors())
    report = convert(source, tmp_path / "drafter", tiny)
    assert read(tmp_path / "drafter")[0]["eagle_aux_hidden_state_layer_ids"] == expected
    assert any(str(expected) in note for note in report.notes) is ("eagle_aux_hidden_state_layer_ids" not in keys)


def test_unusual_auxiliary_layers_round_trip(tiny: Verifier, tmp_path: Path) -> None:
    keys = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}}
    convert(write(tmp_path / "research", {**EAGLE3_CONFIG, **keys}, eagle3_tensors()), tmp_path / "drafter", tiny)
    report = convert_back(tmp_path / "drafter", tmp_path / "back", "specforge")
    assert read(tmp_path / "back")[0].items() >= keys.items()
    assert "SpecForge, they would count layer outputs" in report.notes[0]
    with pytest.raises(CheckpointError, match=r"is \[3, 4, 6\]; SafeAILab's code always reads \[2, 4, 5\]"):
        convert_back(tmp_path / "drafter", tmp_path / "other", "safeailab")


class Code:
    """Unpickling it opens (and so makes) a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("written_by", ["torch.save", "pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(written_by: str, tiny: Verifier, tmp_path: Path) -> None:
    source = write(tmp_path / "research", EAGLE3_CONFIG, eagle3_tensors(), "bin")
    file, ran = source / "pytorch_model.bin", tmp_path / "ran"
    content = {**eagle3_tensors(), "extra": Code(ran)}
    if written_by == "torch.save":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .*holds more than tensors"):
        convert(source, tmp_path / "drafter", tiny)
    assert not ran.exists()
    assert not (tmp_path / "drafter").exists()
    if written_by == "torch.save":  # it would have run
        torch.load(file, weights_only=False)["extra"].close()
        assert ran.exists()


def test_plain_objects_beside_tensors_are_refused(tiny: Verifier, tmp_path: Path) -> None:
    source = write(tmp_path / "research", EAGLE3_CONFIG, eagle3_tensors(), "bin")
    torch.save({**eagle3_tensors(), "step": 3}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors: 'step' is a int"):
        convert(source, tmp_path / "drafter", tiny)
    torch.save([torch.ones(1)], source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list; expected are tensors by name"):
        convert(source, tmp_path / "drafter", tiny)


Change = Callable[[dict[str, Any], Tensors], None]


def setting(**changes: Any) -> Change:
    """A change of config.json; None deletes a key."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for key, value in changes.items():
            config[key] = value
            if value is None:
                del config[key]

    return change


def tensor(name: str, value: Tensor | None) -> Change:
    """A change of one tensor; None deletes it."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = torch.empty(0) if value is None else value
        if value is None:
            del tensors[name]

    return change


def inner(**changes: Any) -> Change:
    """A change within dflash_config."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["dflash_config"] = {**config["dflash_config"], **changes}

    return change


WRONG_D2T = make_mapping().d2t.clone()
WRONG_D2T[3] += 1
OUTSIDE_D2T = make_mapping().d2t.clone()
OUTSIDE_D2T[-1] += VOCAB
REFUSED_EAGLE3 = [
    (
        tensor("midlayer.mlp.up_proj.weight", torch.ones(36, 23)),
        r"midlayer.mlp.up_proj.weight is .*, 23\]; expected .*, 24\]",
    ),
    (tensor("fc.weight", torch.ones(24, 48)), r"fc.weight is torch.float32 \[24, 48\]; expected .* \[24, 72\]"),
    (tensor("norm.weight", torch.ones(24, dtype=torch.int8)), r"norm.weight is torch.int8 .*floating-point"),
    (tensor("norm.weight", torch.full((24,), math.inf)), "norm.weight has values that are not finite"),
    (tensor("midlayer.hidden_norm.weight", None), r"no tensor midlayer.hidden_norm.weight; expected is .* \[24\]"),
    (tensor("lm_head.weight", None), r"has no tensor lm_head.weight; expected is one of shape \[16, 24\]"),
    (
        tensor("midlayer.self_attn.q_proj.bias", torch.ones(32)),
        r"q_proj.bias \[32\] is unknown to a Eagle3Drafter .*expected are .*midlayer.self_attn.q_proj.weight",
    ),
    (tensor("layers.0.mlp.up_proj.weight", torch.ones(36, 24)), "two tensors stand for layers.0.mlp.up_proj.weight"),
    (tensor("mask_hidden", torch.ones(1, 1, 72)), r"mask_hidden \[1, 1, 72\] is unknown"),
    (tensor("d2t", None), r"has no tensor d2t; expected is torch.int64 \[16\]"),
    (tensor("d2t", make_mapping().d2t.int()), r"d2t is torch.int32 \[16\]; expected is torch.int64 \[16\]"),
    (tensor("d2t", make_mapping().d2t[:-1]), r"d2t is torch.int64 \[15\]; expected is torch.int64 \[16\]"),
    (tensor("d2t", WRONG_D2T), "t2d keeps 16 of 40 tokens, but not those that d2t's 16 offsets stand for"),
    (tensor("t2d", torch.ones(39, dtype=torch.bool)), r"t2d is torch.bool \[39\]; expected is torch.bool \[40\]"),
    (tensor("embed_tokens.weight", torch.ones(VOCAB, HIDDEN)), r"embed_tokens.weight .* is not the verifier's"),
    (setting(draft_vocab_size=VOCAB), r"d2t is torch.int64 \[16\]; expected is torch.int64 \[40\]"),
    (setting(hidden_size=None), "lacks hidden_size"),
    (setting(num_attention_heads=0), "num_attention_heads is 0; it must be a whole number, at least 1"),
    (setting(hidden_act="gelu"), "hidden_act is 'gelu'; drafters here have 'silu'"),
    (setting(rope_scaling={"rope_type": "longrope"}), "rope_type 'longrope' is not supported"),
    (setting(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is False"),
    (setting(eagle_config=[1]), r"eagle_config is \[1\]; it must be an object"),
    (setting(eagle_aux_hidden_state_layer_ids=[2, 2, 4]), "must be a list of different layer numbers"),
    (setting(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "config.json: eagle_aux_.*_ids has 9; the verifier has 8"),
    (setting(eagle_aux_hidden_state_layer_ids=[2, 4]), r"fc.weight is .*\[24, 72\]; expected .*\[24, 48\]"),
    (setting(target_hidden_size=32), r"fc.weight is .*\[24, 72\]; expected .*\[24, 96\]"),
]  # fmt: skip
REFUSED_DFLASH = [
    (setting(num_target_layers=9), "num_target_layers is 9; the verifier has 8 layers"),
    (setting(block_size=None), "lacks block_size"),
    (setting(layer_types=["sliding_attention", "full_attention"]), "drafters here have full_attention in all layers"),
    (setting(layer_types=None, use_sliding_window=True), "drafters here have full_attention in all layers"),
    (setting(is_causal=True), "is_causal is True"),
    (setting(dflash_config={"mask_token_id": MASK_TOKEN}), "lacks target_layer_ids"),
    (inner(block_size=8), "block_size is 6, in dflash_config 8"),
    (inner(mask_token_id=None), "lacks mask_token_id"),
    (inner(target_layer_ids=[1, 3, 7]), "aux_hidden_state_layer_ids has 8; the verifier has 8 layers"),
    (inner(target_layer_ids=[1, 3]), r"fc.weight is .*\[24, 72\]; expected .*\[24, 48\]"),
    (inner(output_multiplier=0.5), "output_multiplier is 0.5; drafters here have 1.0"),
    (inner(novelty=1), "dflash_config.novelty is not known here"),
    (tensor("lm_head.weight", torch.ones(VOCAB, HIDDEN)), "lm_head.weight .* is not the verifier's"),
    (tensor("embed_tokens.weight", torch.ones(VOCAB, 12)), r"\[40, 12\] is not the verifier's \[40, 24\]"),
    (tensor("layers.1.self_attn.q_norm.weight", None), "has no tensor layers.1.self_attn.q_norm.weight"),
    (tensor("layers.2.self_attn.q_norm.weight", torch.ones(8)), r"layers.2.self_attn.q_norm.weight \[8\] is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [("eagle3", *case) for case in REFUSED_EAGLE3] + [("dflash", *case) for case in REFUSED_DFLASH],
)
def test_what_does_not_fit_is_named(method: str, change: Change, message: str, tiny: Verifier, tmp_path: Path) -> None:
    config = dict(EAGLE3_CONFIG if method == "eagle3" else DFLASH_CONFIG)
    tensors = eagle3_tensors() if method == "eagle3" else dflash_tensors()
    change(config, tensors)
    source = write(tmp_path / "research", config, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(source, tmp_path / "new" / "drafter", tiny)
    assert str(source) in str(caught.value)
    assert ".tmp-" not in str(caught.value)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_d2t_beyond_the_vocabulary_cannot_rebuild_t2d(tiny: Verifier, tmp_path: Path) -> None:
    tensors = eagle3_tensors() | {"d2t": OUTSIDE_D2T}
    del tensors["t2d"]
    with pytest.raises(CheckpointError, match="d2t leads out of the vocabulary of 40 tokens"):
        convert(write(tmp_path / "research", EAGLE3_CONFIG, tensors), tmp_path / "drafter", tiny)


def test_another_verifier_is_refused(tmp_path: Path) -> None:
    head = {name: torch.cat([x, x[:10]]) if x.ndim == 2 else x for name, x in head_tensors().items()}
    other = write_verifier(tmp_path / "other", head, vocab_size=VOCAB + 10)
    source = write(tmp_path / "research", EAGLE3_CONFIG, eagle3_tensors())
    with pytest.raises(CheckpointError, match=r"does not fit the verifier .*config.json: vocab_size is 40; .* is 50"):
        convert(source, tmp_path / "drafter", other)


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({}, ["fc.weight", "layers.0.mlp.up_proj.weight"], 'EAGLE-1 or HASS.*vllm serve VERIFIER .*"method": "eagle"'),
        ({}, ["fc.weight", "fc.bias"], r"not one with fc\.bias"),
        ({}, ["mtp.fc.weight"], r'native MTP head \(mtp\.fc\.weight\).*"method": "mtp"'),
        ({}, ["model.mtp_layers.0.input_proj.weight"], "native MTP head"),
        ({}, ["model.layers.61.eh_proj.weight"], "native MTP head"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, ["fc.weight"], "is a DFlash2DraftModel"),
        ({"speculators_model_type": "eagle3"}, ["fc.weight"], r"is in the speculators format already \(eagle3\)"),
        ({}, ["model.embed_tokens.weight"], "is no drafter that is known here"),
    ],
)
def test_other_kinds_are_refused_with_what_serves_them(
    config: dict[str, Any], names: list[str], message: str, tiny: Verifier, tmp_path: Path
) -> None:
    source = write(tmp_path / "research", config, {name: torch.ones(1) for name in names})
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "drafter", tiny)


def test_files_that_cannot_be_read(tiny: Verifier, tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "drafter", tiny)

    refused(tmp_path / "nowhere", r"Cannot read .*nowhere/config\.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    texts = (("{", "is not valid JSON"), ("[]", "must hold a JSON object, not list"), ("{}", "has neither"))
    for text, message in texts:
        (empty / "config.json").write_text(text)
        refused(empty, message)
    damaged = write(tmp_path / "damaged", EAGLE3_CONFIG, eagle3_tensors())
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(damaged, r"model\.safetensors is damaged")
    for storage, stem in (("sharded safetensors", "model"), ("sharded bin", "pytorch_model")):
        folder = write(tmp_path / storage, EAGLE3_CONFIG, eagle3_tensors(), storage)
        shard = next(folder.glob("*-00002-of-*"))
        (index_file,) = folder.glob("*.index.json")
        index = json.loads(index_file.read_text())
        index["weight_map"]["ghost"] = shard.name
        index_file.write_text(json.dumps(index))
        refused(folder, f"{stem}-00002-of-00002.*tensor ghost is missing in it")
        for wrong in ({"a": "../model.safetensors"}, {"a": 3}, []):
            index_file.write_text(json.dumps({"weight_map": wrong}))
            refused(folder, "weight_map must name a file of this folder")
        del index["weight_map"]["ghost"], index["weight_map"]["fc.weight"]
        index_file.write_text(json.dumps(index))
        refused(folder, "tensor fc.weight is in it, but not in the index")
        shard.unlink()
        index["weight_map"]["fc.weight"] = shard.name
        index_file.write_text(json.dumps(index))
        refused(folder, "00002-of-00002.* is missing")
    assert not (tmp_path / "drafter").exists()


def test_a_mask_embedding_of_its_own_is_refused(tiny: Verifier, tmp_path: Path) -> None:
    source = write(tmp_path / "research", DFLASH_CONFIG, dflash_tensors())
    torch.save(torch.ones(HIDDEN), source / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: the speculators format has no"):
        convert(source, tmp_path / "drafter", tiny)


def test_existing_folders_are_left_alone(tiny: Verifier, tmp_path: Path) -> None:
    source = write(tmp_path / "research", EAGLE3_CONFIG, eagle3_tensors())
    convert(source, tmp_path / "drafter", tiny)
    before = read(tmp_path / "drafter")[0]
    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, tmp_path / "drafter", tiny, 5)
    with pytest.raises(CheckpointError, match="exists already"):
        convert_back(tmp_path / "drafter", source, "specforge")
    assert read(tmp_path / "drafter")[0] == before


def test_draft_length(tiny: Verifier, tmp_path: Path) -> None:
    eagle3 = write(tmp_path / "eagle3", EAGLE3_CONFIG, eagle3_tensors())
    dflash = write(tmp_path / "dflash", DFLASH_CONFIG, dflash_tensors())
    for source, length in ((eagle3, 7), (dflash, 2)):
        convert(source, tmp_path / f"drafter-{length}", tiny, length)
        described = read(tmp_path / f"drafter-{length}")[0]
        assert described["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == length
    for source, length, message in (
        (eagle3, 0, "num_speculative_tokens is 0; for this drafter it must be at least 1"),
        (dflash, BLOCK, "num_speculative_tokens is 6; for this drafter it must be between 1 and 5"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "drafter", tiny, length)


@pytest.mark.parametrize(
    ("options", "layout", "message"),
    [
        ({}, "z-lab", "is a drafter of method eagle3; the layout z-lab is dflash's"),
        ({}, "specforge", "norm_before_residual is true.*SGLang"),
        ({"norm_before_residual": False, "num_layers": 2}, "specforge", "num_hidden_layers is 2.*one draft layer"),
        ({"norm_before_residual": False, "layer_type": "qwen3"}, "specforge", "draft layers are of type 'qwen3'"),
        ({"norm_before_residual": False, "aux_layer_ids": (2, 4)}, "specforge", "has three auxiliary layers"),
        ({"norm_before_residual": False, "aux_layer_ids": (1, 4, 5)}, "specforge", "cannot say that"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    options: dict[str, Any], layout: Any, message: str, tiny: Verifier, tmp_path: Path
) -> None:
    save_drafter(make_drafter(**options), tmp_path / "drafter", tiny, 3, make_mapping())
    validate_drafter(tmp_path / "drafter", tiny)
    with pytest.raises(CheckpointError, match=message):
        convert_back(tmp_path / "drafter", tmp_path / "back", layout)
    assert not (tmp_path / "back").exists()


def test_incomplete_drafters_are_not_converted_back(tiny: Verifier, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save_drafter(make_drafter(norm_before_residual=False), folder, tiny, 3, make_mapping())
    tensors = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if name not in ("d2t", "t2d")}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lengths of d2t and t2d are None; config\.json asks for \(16, 40\)"):
        convert_back(folder, tmp_path / "back", "specforge")
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor layers\.0\.mlp\.up_proj\.weight"):
        convert_back(folder, tmp_path / "back", "specforge")
