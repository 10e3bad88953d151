"""A small world that a drafter can learn: every token has one successor, and the verifier knows it.

The verifier's last state at token t points at the successor of t, so its own head predicts it; the auxiliary states
carry the token's embedding. The drafter has to learn the successor of the successor.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from speculators.config import RetrainConfig
from speculators.hidden_states.format import INDEX_FILE, SHARDS, Sidecar, StateFormat, token_checksum
from speculators.hidden_states.writer import ShardWriter
from speculators.manifest import Stage, StagePlan
from speculators.progress import Progress
from speculators.store import Store
from speculators.training.job import TrainingJob
from speculators.training.launch import train
from speculators.training.trainer import Trainer
from speculators.verifier import Verifier, read_verifier

VOCAB, HIDDEN, LAYERS = 128, 32, 4
AUX_LAYERS = [1, 2, 3]


@dataclass
class SyntheticTraining:
    """Everything that :func:`speculators.training.launch.train` needs, on tiny random data."""

    config: RetrainConfig
    store: Store
    verifier: Verifier
    prepare_plan: StagePlan
    extract_plan: StagePlan

    def plan(self) -> StagePlan:
        """The training's place in the store."""
        parameters = self.config.train.model_dump(mode="json", exclude={"device", "checkpoint_every_steps"})
        return StagePlan(Stage.TRAIN, {"extract": self.extract_plan.fingerprint, "parameters": parameters})

    def run(self, records: list[dict[str, Any]] | None = None, progress: Progress | None = None) -> Any:
        """Train; metrics records go to ``records``."""
        on_metrics = (lambda record: None) if records is None else records.append
        return train(
            self.config,
            self.plan(),
            self.prepare_plan,
            self.extract_plan,
            self.store,
            self.verifier,
            AUX_LAYERS,
            progress or Progress(),
            on_metrics,
        )


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """A process group with this process as its only rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def make_trainer(training: SyntheticTraining, layers: list[int] = AUX_LAYERS) -> Trainer:
    """The training's trainer in this process, for :func:`only_rank`."""
    plans = training.plan(), training.prepare_plan, training.extract_plan
    job = TrainingJob(training.config, *plans, training.store, training.verifier, layers, [])
    return Trainer(job, torch.device("cpu"))


def make_training(
    folder: Path, store: Store, train_samples: int = 40, validation_samples: int = 8, **train_fields: Any
) -> SyntheticTraining:
    """Write a verifier, prepared samples and hidden states.

    Args:
        folder: Receives the verifier and the work folder.
        train_fields: Fields of TrainConfig other than these tests' defaults.
    """
    fields = {
        "epochs": 2,
        "ttt_steps": 3,
        "tokens_per_batch": 128,
        "processes": 2,
        "learning_rate": 1e-2,
        "checkpoint_every_steps": 3,
        **train_fields,
    }
    config = RetrainConfig.model_validate(
        {
            "store": store.url,
            "work_dir": str(folder / "work"),
            "train": fields,
            "prepare": {"draft_vocab_size": None, "max_length": 64},
        }
    )
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    successor = torch.randperm(VOCAB, generator=generator)
    verifier = write_verifier(folder / "verifier", embedding, folder / "work" / "cache")
    prepare_plan = StagePlan(Stage.PREPARE, {"synthetic": [train_samples, validation_samples]})
    extract_plan = StagePlan(
        Stage.EXTRACT,
        {
            "prepare": prepare_plan.fingerprint,
            "states": StateFormat((*AUX_LAYERS, LAYERS), "bfloat16", "bfloat16").to_json(),
        },
    )

    rows, states = [], {}
    numbers = np.random.default_rng(0)
    for number in range(train_samples + validation_samples):
        length, prompt_length = int(numbers.integers(12, 60)), int(numbers.integers(2, 8))
        tokens = [int(numbers.integers(VOCAB))]
        while len(tokens) < length:
            tokens.append(int(successor[tokens[-1]]))
        token_ids = torch.tensor(tokens)
        sample_id = f"prompt-{number}/0"
        last = 4 * embedding[successor[token_ids]]
        noise = [0.1 * torch.randn(length, HIDDEN, generator=generator) for _ in AUX_LAYERS]
        states[sample_id] = torch.stack([*(embedding[token_ids] + n for n in noise), last], dim=1).bfloat16()
        rows.append(
            {
                "sample_id": sample_id,
                "prompt_id": f"prompt-{number}",
                "split": "train" if number < train_samples else "validation",
                "token_ids": np.array(tokens, dtype=np.int32),
                "loss_mask": np.arange(length) >= prompt_length,
                "prompt_length": prompt_length,
                "n_tokens": length,
                "n_loss_tokens": length - prompt_length,
            }
        )
    write_samples(store, prepare_plan, rows)
    write_states(store, extract_plan, rows, states)
    return SyntheticTraining(config, store, verifier, prepare_plan, extract_plan)


def write_verifier(folder: Path, embedding: torch.Tensor, cache: Path) -> Verifier:
    """A checkpoint with tied embeddings, final norm and the configuration of a small Llama."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    return read_verifier(folder, source=str(folder), revision=None, cache=cache)


def write_samples(store: Store, plan: StagePlan, rows: list[dict[str, Any]]) -> None:
    store.write_bytes(plan.path("samples.parquet"), pd.DataFrame(rows).to_parquet(index=False))
    plan.complete(store, {"samples.parquet": None}, {})


def write_states(store: Store, plan: StagePlan, rows: list[dict[str, Any]], states: dict[str, torch.Tensor]) -> None:
    """Hidden states as the extraction leaves them, in several shards."""
    states_format = StateFormat.from_json(plan.determinants["states"])
    with ShardWriter(store, plan.directory, states_format, shard_bytes=100_000) as writer:
        for row in rows:
            encoded = states_format.encode(states[row["sample_id"]][:-1], row["prompt_length"] - 1)
            writer.add(row["sample_id"], encoded, token_checksum(row["token_ids"][:-1]))
    sidecars = [Sidecar.from_json(store.read_json(p)) for p in store.list(plan.path(SHARDS)) if p.endswith(".json")]
    index = pd.DataFrame([{"shard": s.shard, **vars(entry)} for s in sidecars for entry in s.samples])
    store.write_bytes(plan.path(INDEX_FILE), index.to_parquet(index=False))
    plan.complete(store, {INDEX_FILE: None}, {"hidden_size": HIDDEN})
