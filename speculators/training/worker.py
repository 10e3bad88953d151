"""One rank of a training, started by torchrun: ``python -m speculators.training.worker JOB.json``."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from speculators.errors import PipelineError
from speculators.training.job import TrainingJob, emit
from speculators.training.trainer import Trainer

_COLLECTIVE_TIMEOUT = timedelta(hours=1)
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Broken pipe", "recv failed")


def main(job_file: str) -> int:
    """Train as one rank. The exit status is 0 when all went well; an error has been reported as an event."""
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    try:
        job = TrainingJob.read(Path(job_file))
        device = _start(job.config.train.device)
        try:
            Trainer(job, device).run()
        finally:
            dist.destroy_process_group()
    except Exception as error:
        emit(
            "error",
            rank=rank,
            type=type(error).__name__,
            message=str(error),
            for_user=isinstance(error, PipelineError),
            lost_peer=_is_lost_peer(error),
        )
        traceback.print_exc()
        return 1
    return 0


def _start(kind: str) -> torch.device:
    """Join the other ranks; share the machine's cores with them."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=_COLLECTIVE_TIMEOUT, device_id=device)
    return device


def _is_lost_peer(error: Exception) -> bool:
    """Whether this rank failed only because another one had ended."""
    if isinstance(error, PipelineError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST_PEER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
