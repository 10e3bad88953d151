"""One rank's training loop, from the samples in the store to the drafters `best` and `last`."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from speculators.checkpoints.speculators_format import read_weights, save_drafter
from speculators.checkpoints.stitch import read_mtp_head
from speculators.config import TrainConfig
from speculators.data.prepare import load_samples, load_vocab_mapping
from speculators.data.vocabulary import VocabMapping
from speculators.errors import CheckpointError, TrainingError
from speculators.hidden_states.online import HybridStates, OnlineStates, StateSource
from speculators.hidden_states.reader import HiddenStateReader
from speculators.models.batch import PackedBatch
from speculators.models.drafter import Drafter, DraftSetting
from speculators.models.methods import METHODS
from speculators.models.mtp import MtpDrafter
from speculators.models.verifier_head import VerifierHead
from speculators.training.batches import BatchLoader, plan_epoch
from speculators.training.job import TrainingJob, emit
from speculators.training.metrics import StepSums
from speculators.training.state import MetricsLog, Standing, StateRecord, StateStore, capture, restore

logger = logging.getLogger(__name__)
RECORD_EVERY_STEPS = 5
FINAL_LEARNING_RATE_SHARE = 0.1


class Trainer:
    """Trains the drafter of one job as one of the ranks of the default process group.

    Args:
        job: What to train on what.
        device: Where this rank computes.

    Raises:
        TrainingError: There is nothing to train or to validate on, or the extracted layers are not the job's.
        StoreError: Data or hidden states are missing or damaged.
    """

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        self.job, self.config, self.device = job, job.config.train, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        self.standing = Standing()
        self.states = StateStore(job.store, job.plan.path("state"), job.plan.fingerprint)
        self.metrics = MetricsLog(job.store, job.plan.path("metrics.jsonl"))
        self._load_data()
        self._plan_steps()
        self._build_model()
        self.window = StepSums(self.steps)
        self.grad_norm = 0.0

    def run(self) -> None:
        """Train to the end, from wherever the saved state left off. Rank 0 reports events as it goes."""
        self._resume()
        while self.standing.epoch < self.config.epochs:
            self._train_epoch()
            self._finish_epoch()
            self._keep_states()
        self.reader.close()
        if self.is_first:
            emit("finished", figures=self._final_figures())

    # --- preparation ---------------------------------------------------------------------------------------------

    def _load_data(self) -> None:
        job = self.job
        self.samples = {s.sample_id: s for s in load_samples(job.store, job.prepare_plan, ["train", "validation"])}
        self.vocab_mapping = load_vocab_mapping(job.store, job.prepare_plan)
        self.reader = self._state_source()
        expected = [*job.aux_layer_ids, job.verifier.num_layers]
        if list(self.reader.layer_ids) != expected:
            raise TrainingError(
                f"The hidden states in {job.store.url_of(job.extract_plan.directory)} are of layers"
                f" {list(self.reader.layer_ids)}, but training needs {expected}."
            )
        for sample in self.samples.values():
            self.reader.check_tokens(sample.sample_id, sample.token_ids.tolist())

    def _state_source(self) -> StateSource:
        """The extracted set where it is whole; else states that vLLM makes now, kept or not."""
        job = self.job
        finished = job.extract_plan.finished(job.store) is not None
        if finished or not job.endpoints:
            return HiddenStateReader.open(job.store, job.extract_plan, int(self.config.cache_gib * 2**30))
        source = (job.config, job.extract_plan, job.store, job.verifier)
        in_flight = -(-job.config.extract.concurrency // self.ranks)
        online = OnlineStates(*source, job.endpoints, self.samples, job.plan.fingerprint, in_flight)
        return HybridStates(online, *source, self.samples) if job.config.extract.mode == "hybrid" else online

    def _plan_steps(self) -> None:
        lengths: dict[str, dict[str, int]] = {"train": {}, "validation": {}}
        for sample in self.samples.values():
            lengths[sample.split][sample.sample_id] = len(sample.token_ids)
        for split, field in (("train", "regenerate.max_prompts"), ("validation", "prepare.validation_prompts")):
            if not lengths[split]:
                raise TrainingError(f"The prepared data have no {split} samples. Raise {field}.")
        self.lengths = lengths["train"]
        budget = self.config.tokens_per_batch * self.ranks
        self.plans = [
            plan_epoch(self.lengths, budget, self.ranks, (self.config.seed, epoch))
            for epoch in range(self.config.epochs)
        ]
        self.validation_plan = plan_epoch(lengths["validation"], budget, self.ranks, None)
        self.total_steps = sum(len(plan) for plan in self.plans)

    def _build_model(self) -> None:
        torch.manual_seed(self.config.seed)
        job, method = self.job, METHODS[self.config.method]
        if method.drafter.full_vocabulary:
            self.vocab_mapping = None
        kept_ids = self.vocab_mapping.kept_ids if self.vocab_mapping else None
        head = VerifierHead.load(job.verifier, kept_ids).to(self.device)
        setting = DraftSetting(
            train=self.config,
            aux_layer_ids=job.aux_layer_ids,
            draft_vocab_size=len(head.lm_head),
            num_speculative_tokens=job.config.evaluate.num_speculative_tokens,
            mask_token_id=self._mask_token_id(head.embed_tokens) if method.has_mask_token else 0,
        )
        self.drafter = method.drafter(method.config.for_verifier(job.verifier, setting))
        self.drafter.initialise(head, self._some_states())
        if isinstance(self.drafter, MtpDrafter):
            start = self.config.init_from
            self.drafter.load_head(read_weights(Path(start))[0] if start else read_mtp_head(job.verifier.path).tensors)
        elif self.config.init_from is not None:
            warm_start(self.drafter, Path(self.config.init_from), self.vocab_mapping)
        objective = self.drafter.objective(head, kept_ids, self.config).to(self.device)
        self.steps, self.weights = objective.steps, objective.weights
        self.model = DistributedDataParallel(objective, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.parameters = {n: p for n, p in self.drafter.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.parameters, self.config)

    def _some_states(self) -> torch.Tensor | None:
        """Auxiliary states [n, n_aux * H] of a few training samples."""
        if not self.job.aux_layer_ids:
            return None
        return torch.cat([self.reader.read(name)[:, :-1].flatten(1).float() for name in sorted(self.lengths)[:8]])

    def _mask_token_id(self, embeddings: torch.Tensor) -> int:
        """A token that the data never use; of those, the one whose embedding is of the most usual size.

        Raises:
            TrainingError: The data use all.
        """
        used = torch.zeros(len(embeddings), dtype=torch.bool)
        for sample in self.samples.values():
            used[torch.tensor(sample.token_ids, dtype=torch.int64)] = True
        norms = embeddings.norm(dim=-1).cpu()
        distance = (norms - norms.median()).abs().masked_fill(used, float("inf"))
        if used.all():
            raise TrainingError(
                f"The data use every token of the vocabulary, and {self.config.method} needs one for what is not known"
                " yet. Choose eagle3 or mtp, which need none."
            )
        return int(distance.argmin())

    def _resume(self) -> None:
        """Take up the newest whole state, chosen by rank 0 for all ranks."""
        record = self.states.latest() if self.is_first else None
        chosen: list[str | None] = [record.to_json() if record else None]
        dist.broadcast_object_list(chosen, src=0)
        if chosen[0] is not None:
            record = StateRecord.from_json(chosen[0])
            restore(self.states.load(record), self.parameters, self.optimizer)
            self.standing = record.standing
            self.window = StepSums(self.steps, record.standing.window)
        if self.is_first:
            self.metrics.resume(self.standing.step)
            emit("started", step=self.standing.step, steps=self.total_steps)
            for values in self.metrics.records:
                emit("metrics", **values)
            if self.standing.step:
                logger.info("Going on from step %d of %d.", self.standing.step, self.total_steps)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        plan = self.plans[self.standing.epoch][self.standing.position :]
        with self._loader([step[self.rank] for step in plan]) as batches:
            self._begin_window(batches)
            for step, batch in zip(plan, batches, strict=True):
                started = time.monotonic()
                self.grad_norm = self._train_step(batch, step[self.rank])
                self.standing.step += 1
                self.standing.position += 1
                tokens = sum(self.lengths[s] for share in step for s in share)
                self.standing.tokens += tokens
                self.window_tokens += tokens
                self.standing.seconds += time.monotonic() - started
                if self.standing.position == len(self.plans[self.standing.epoch]):
                    break  # _finish_epoch reports and saves
                if self.standing.step % RECORD_EVERY_STEPS == 0:
                    self._report(self._window_figures())
                    self._begin_window(batches)
                if self.standing.step % self.config.checkpoint_every_steps == 0:
                    self._save_state()

    def _train_step(self, batch: PackedBatch, share: list[str]) -> float:
        """One optimiser step; the gradient's norm before clipping.

        Each rank's loss is its sum over positions divided by the count over all ranks, so the summed gradients are
        those of the whole global batch, however it is split.
        """
        set_learning_rate(self.optimizer, learning_rate(self.standing.step, self.total_steps, self.config))
        loss_sums, sums = self._forward(self.model, batch)
        if not bool(loss_sums.isfinite().all()):
            raise self._not_finite("loss", batch, share)
        sums = self._over_ranks(sums)
        self.window.add(sums)
        counts = sums[1].clamp(min=1).to(loss_sums.dtype)
        # DDP averages gradients over the ranks, hence the factor.
        loss = self.ranks * (self.weights * loss_sums / counts).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm))
        if not math.isfinite(grad_norm):
            raise self._not_finite("gradient", batch, share)
        self.optimizer.step()
        return grad_norm

    def _begin_window(self, batches: BatchLoader) -> None:
        """Start the clock of the next record; the sums of one that a resumed run had begun stay."""
        self.window_tokens, self.window_started = 0, time.monotonic()
        self.window_batches = batches
        self.window_waited, self.window_read = batches.waited_s, self.reader.read_bytes

    def _window_figures(self) -> dict[str, Any]:
        """Means over the steps since the last record, and how this rank got its hidden states."""
        seconds = time.monotonic() - self.window_started
        figures = {
            "step": self.standing.step,
            "epoch": self.standing.epoch,
            **self.window.figures(self.weights),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": self.window_tokens / seconds,
            "grad_norm": self.grad_norm,
            "states_mb_per_s": (self.reader.read_bytes - self.window_read) / seconds / 1e6,
            "waiting_for_states": (self.window_batches.waited_s - self.window_waited) / seconds,
        }
        self.window.clear()
        return figures

    # --- the end of an epoch -------------------------------------------------------------------------------------

    def _finish_epoch(self) -> None:
        """Validate, keep the drafter as `last` and, where it is the best so far, as `best`; save the state."""
        trained, validated = self._window_figures(), self._validate()
        best = self.standing.best
        is_best = best is None or validated["predicted_acceptance_length"] > best["predicted_acceptance_length"]
        if is_best:
            self.standing.best = {"step": self.standing.step, "epoch": self.standing.epoch, **validated}
        self._report({**trained, **validated})
        if self.is_first:
            self._save_drafter(["best", "last"] if is_best else ["last"])
        self.standing.epoch += 1
        self.standing.position = 0
        self._save_state()

    def _keep_states(self) -> None:
        """After the first epoch of the hybrid mode every sample has been read: from now on all come from the store."""
        if not isinstance(self.reader, HybridStates):
            return
        self.reader.flush()
        dist.barrier()
        if self.is_first:
            self.reader.finish()
        dist.barrier()
        self.reader.close()
        self.reader = self._state_source()

    def _validate(self) -> dict[str, float]:
        """Figures over the whole validation split, the same on every rank."""
        local = StepSums(self.steps)
        self.model.module.eval()
        with torch.no_grad(), self._loader([step[self.rank] for step in self.validation_plan]) as batches:
            for batch in batches:
                local.add(self._forward(self.model.module, batch)[1])
        self.model.module.train()
        sums = StepSums(self.steps, self._over_ranks(local.values))
        return {
            **sums.figures(self.weights, prefix="validation_"),
            "predicted_acceptance_length": sums.predicted_acceptance_length(),
        }

    def _save_drafter(self, names: list[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="drafter-") as folder:
            save_drafter(
                self.drafter,
                Path(folder),
                self.job.verifier,
                self.job.config.evaluate.num_speculative_tokens,
                self.vocab_mapping,
            )
            for name in names:
                self.job.store.upload_folder(Path(folder), self.job.plan.path(name))

    def _save_state(self) -> None:
        """Write metrics and state; the others wait at the next step's first exchange."""
        if not self.is_first:
            return
        self.standing.window = self.window.values.tolist()
        self.metrics.write()
        self.states.save(self.standing, capture(self.parameters, self.optimizer))

    # --- helpers -------------------------------------------------------------------------------------------------

    def _loader(self, shares: list[list[str]]) -> BatchLoader:
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return BatchLoader(shares, self.samples, self.reader, dtype, pin_memory=self.device.type == "cuda")

    def _forward(self, objective: torch.nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss sums [K] and :class:`StepSums` values [5, K] of this rank's batch; bfloat16 products on a GPU."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return objective(batch.to(self.device))

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's values."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def _report(self, record: dict[str, Any]) -> None:
        if self.is_first:
            self.metrics.append(record)
            emit("metrics", **record)

    def _not_finite(self, what: str, batch: PackedBatch, share: list[str]) -> TrainingError:
        broken = [s for s in share if not bool(self.reader.read(s).isfinite().all())]
        where = f"step {self.standing.step + 1} (epoch {self.standing.epoch})"
        if broken:
            return TrainingError(
                f"The {what} is not finite at {where}: the hidden states of {', '.join(broken)} have values that are"
                " not finite. Extract them anew (delete the hidden states' folder in the store)."
            )
        return TrainingError(
            f"The {what} is not finite at {where}, with samples {', '.join(share)}. Lower train.learning_rate."
        )

    def _final_figures(self) -> dict[str, Any]:
        assert self.standing.best is not None
        best = {k: v for k, v in self.standing.best.items() if k not in ("step", "epoch")}
        return {
            "steps": self.standing.step,
            "epochs": self.standing.epoch,
            "tokens": self.standing.tokens,
            "tokens_per_s": self.standing.tokens / max(self.standing.seconds, 1e-9),
            "best_step": self.standing.best["step"],
            "best_epoch": self.standing.best["epoch"],
            **best,
        }


def warm_start(drafter: Drafter, folder: Path, mapping: VocabMapping | None) -> None:
    """Take over another drafter's tensors; what only this method has keeps its initial values.

    Raises:
        CheckpointError: The other drafter has another draft vocabulary, or a tensor that this one lacks or has in
            another shape.
    """
    tensors, other = read_weights(folder)
    if (mapping is None) != (other is None) or (mapping and other and not torch.equal(mapping.d2t, other.d2t)):
        raise CheckpointError(
            f"train.init_from: the drafter in {folder} has another draft vocabulary than these data. Use the data's"
            " own drafter, or the whole vocabulary for both (prepare.draft_vocab_size: the verifier's)."
        )
    mine = drafter.stored_tensors()
    for name, tensor in tensors.items():
        if name not in mine or mine[name].shape != tensor.shape:
            found = list(mine[name].shape) if name in mine else "none"
            raise CheckpointError(
                f"train.init_from: {folder} has {name} {list(tensor.shape)}; this drafter has {found}. It must be of"
                " the same method (or DFlash, for dspark and dflash2), with the same layers and sizes."
            )
        with torch.no_grad():
            mine[name].copy_(tensor)


def make_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on norms and other vectors."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of a step counted from 0: linear warm-up to the peak, then a cosine down to a tenth of it."""
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup - 1)
    share = FINAL_LEARNING_RATE_SHARE
    return config.learning_rate * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value
