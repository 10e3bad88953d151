"""Peak memory and time of lm_head with the loss, in chunks that are recomputed against the plain way, side by side.

Run it:  .venv/bin/python -m infra.benchmarks.loss_memory [--rows 2048] [--vocabulary 32768] [--hidden 1024]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import torch

from speculators.config import LossName
from speculators.models.losses import MAX_LOGITS, Distributions, head_losses, in_chunks

STEPS = 3


def measure(way: str, loss: LossName, rows: int, vocabulary: int, hidden: int) -> tuple[float, float, float]:
    """Peak memory added (MiB), seconds, and the loss, of one forward and backward pass in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    states = torch.randn(rows, STEPS, hidden, requires_grad=True)
    lm_head = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_(True)
    last, head = torch.randn(rows, hidden), torch.randn(vocabulary, hidden) / hidden**0.5
    counted = torch.ones(rows, STEPS, dtype=torch.bool)
    states.grad, lm_head.grad = torch.zeros_like(states), torch.zeros_like(lm_head)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if way == "plain":
        losses = Distributions(states @ lm_head.T, (last @ head.T)[:, None]).loss({loss: 1.0})
    else:

        def compute(*chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return head_losses(chunk[0], lm_head, chunk[1] @ head.T, chunk[2], {loss: 1.0})

        losses, _ = in_chunks(compute, max(1, MAX_LOGITS // (STEPS * vocabulary)), states, last, counted)
    losses.sum().backward()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak - before) / 1024, seconds, float(losses.sum())


def main() -> None:
    """Measure each way in a process of its own, and print both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="positions with a loss")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(f"{arguments.rows} positions x {STEPS} draft positions x {arguments.vocabulary} tokens, float32")
    print("| Loss | Way | Peak memory (MiB) | Seconds | Loss |\n| --- | --- | --- | --- | --- |")
    losses: tuple[LossName, ...] = ("kl_div", "tv")
    for loss in losses:
        results = []
        for way in ("plain", "chunks"):
            with context.Pool(1) as pool:
                job = (way, loss, arguments.rows, arguments.vocabulary, arguments.hidden)
                results.append(pool.apply(measure, job))
            memory, seconds, value = results[-1]
            print(f"| {loss} | {way} | {memory:.0f} | {seconds:.1f} | {value:.3f} |")
        print(
            f"| {loss} | chunks / plain | {results[1][0] / results[0][0]:.2f} | {results[1][1] / results[0][1]:.2f} | |"
        )


if __name__ == "__main__":
    main()
