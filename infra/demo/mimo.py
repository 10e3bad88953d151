"""A small verifier of MiMo's architecture with an MTP head to fine-tune: SmolLM2-135M-Instruct, and a head of its own.

Run it:  .venv/bin/python -m infra.demo.mimo TARGET

MiMo's layers are Qwen2's: Llama's with biases, which are zero here, so the verifier answers as SmolLM2 does. The head
begins as a copy of the last layer and is pretrained for a moment to predict the token after the next one (one step, as
verifiers' makers do), on the prose of Python's own reference.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.checkpoints.stitch import whole_folder
from speculators.config import RetrainConfig, TrainConfig
from speculators.models.batch import PackedBatch
from speculators.models.mtp import MtpConfig, MtpDrafter
from speculators.models.verifier_head import VerifierHead
from speculators.verifier import Verifier, read_text_config, resolve_verifier

STEPS = 120
_ROWS, _LENGTH = 2, 192
_LEARNING_RATE, _WARMUP = 1e-3, 10
_WEIGHTS = "model.safetensors"


def build(target: Path, verifier: Verifier, steps: int = STEPS) -> None:
    """Make the verifier with its head; a few minutes on two cores.

    Args:
        target: Folder that must not exist. It appears whole or not at all.
        verifier: A Llama with tied embeddings in one safetensors file: the built-in verifier.
        steps: Pretraining steps of 384 tokens.
    """
    with whole_folder(target) as folder:
        for file in verifier.path.iterdir():
            if file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
        text = verifier.config
        config = {
            **text,
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
            "use_sliding_window": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = load_file(verifier.path / _WEIGHTS)
        for layer in range(verifier.num_layers):
            for name in "qkv":
                module = f"model.layers.{layer}.self_attn.{name}_proj"
                weights[f"{module}.bias"] = torch.zeros(len(weights[f"{module}.weight"]))
        save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
        head = _new_head(folder, weights, verifier.num_layers)
        _pretrain(head, folder, steps)
        trained = {name: tensor.contiguous() for name, tensor in head.stored_tensors().items()}
        save_file({**weights, **trained}, folder / _WEIGHTS, metadata={"format": "pt"})


def _new_head(folder: Path, weights: dict[str, Tensor], num_layers: int) -> MtpDrafter:
    """A head that starts as the verifier's last layer, fed with the state and half the next token's embedding."""
    head = MtpDrafter(MtpConfig.for_folder(folder))
    head.initialise(VerifierHead.read(folder, read_text_config(folder), None))
    last = f"model.layers.{num_layers - 1}."
    head.layer.load_state_dict(
        {name.removeprefix(last): tensor for name, tensor in weights.items() if name.startswith(last)}
    )
    with torch.no_grad():
        head.final_norm.weight.copy_(weights["model.norm.weight"])
        hidden = torch.eye(head.config.hidden_size)
        head.projection.weight.copy_(torch.cat([hidden, 0.5 * hidden], dim=1))
    return head


def _pretrain(head: MtpDrafter, folder: Path, steps: int) -> None:
    tokens = _tokens(folder, steps * _ROWS * _LENGTH)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, arguments: states.append(arguments[0]))
    verifier_head = VerifierHead.read(folder, read_text_config(folder), None)
    objective = head.objective(verifier_head, None, TrainConfig(method="mtp", ttt_steps=1))
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / _WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    places = torch.arange(_LENGTH).expand(_ROWS, _LENGTH)
    progress = tqdm(range(steps), desc="Pretraining the head", unit="step")
    for step in progress:
        rows = tokens[step * _ROWS * _LENGTH :][: _ROWS * _LENGTH].view(_ROWS, _LENGTH)
        states.clear()
        with torch.no_grad():
            model.model(rows)
        everywhere = torch.ones_like(rows, dtype=torch.bool)
        losses, counts = objective(PackedBatch(rows, states[0][:, :, None], everywhere, places * 0, places))
        loss = losses.sum() / counts[1].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.2f}", accuracy=f"{(counts[2] / counts[1]).item():.2f}")


def _tokens(folder: Path, wanted: int) -> Tensor:
    """int64 [wanted] of Python's reference."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for text in topics.values():
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= wanted:
            return torch.tensor(ids[:wanted])
    raise ValueError(f"Python's reference has {len(ids)} tokens; fewer steps, please: {wanted} were asked for.")


def main() -> None:
    """Build it at the place that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder that does not exist yet")
    parser.add_argument("--steps", type=int, default=STEPS, help="pretraining steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    build(arguments.target, resolve_verifier(RetrainConfig()), arguments.steps)


if __name__ == "__main__":
    main()
