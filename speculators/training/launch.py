"""Training from the outside: starts torchrun, passes metrics on, explains failures, writes the manifest."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import speculators
from speculators.config import RetrainConfig
from speculators.errors import TrainingError
from speculators.hidden_states.capture import Capture, remove_online_files
from speculators.manifest import Manifest, StagePlan
from speculators.processes import ManagedProcess
from speculators.progress import Progress
from speculators.store import Store
from speculators.training.job import TrainingJob, parse_event
from speculators.verifier import Verifier

STATE_FOLDER = "state"
_TAIL_LINES = 25
_SHOWN = ("loss", "tokens_per_s", "predicted_acceptance_length")
_FAILED_RANK = re.compile(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def train(
    config: RetrainConfig,
    plan: StagePlan,
    prepare_plan: StagePlan,
    extract_plan: StagePlan,
    store: Store,
    verifier: Verifier,
    layer_ids: list[int],
    progress: Progress,
    on_metrics: Callable[[dict[str, Any]], None],
) -> Manifest:
    """Train a drafter under torchrun, or go on where an earlier run was stopped.

    Where hidden states have not been extracted, a vLLM makes them meanwhile (``extract.mode`` online and hybrid).

    Args:
        layer_ids: Auxiliary layers that feed the drafter; the extracted states have the last layer after them.
        progress: Shows steps, loss and tokens/s.
        on_metrics: Called in this thread with every metrics record (``step``, ``epoch``, ``loss``, ...) as it comes.
            After a resume it gets the earlier records first.

    Returns:
        The manifest; its figures are those of the best epoch. ``best/`` and ``last/`` in the stage's folder are
        drafters that vLLM serves.

    Raises:
        MissingStageError: Data or hidden states have not been made.
        TrainingError: A rank failed; names the rank and its error. Saved state is kept, and the next call goes on.
    """
    plan.begin()
    if (done := plan.finished(store)) is not None:
        return done
    prepare_plan.require(store, "speculators prepare-data")
    if config.extract.mode == "offline":
        extract_plan.require(store, "speculators generate-offline-data")
    work = Path(config.work_dir).resolve()
    job_file = work / "train" / f"{plan.fingerprint}.json"
    with _state_servers(config, extract_plan, store, verifier) as endpoints:
        TrainingJob(config, plan, prepare_plan, extract_plan, store, verifier, layer_ids, endpoints).write(job_file)
        try:
            figures = _run(config, job_file, work / "logs" / f"train-{plan.fingerprint}.log", progress, on_metrics)
        finally:
            remove_online_files(store, extract_plan, owner=plan.fingerprint)
    outputs: dict[str, str | None] = {
        path.removeprefix(f"{plan.directory}/"): None
        for folder in ("best", "last", "metrics.jsonl")
        for path in store.list(plan.path(folder))
    }
    manifest = plan.complete(store, outputs, figures)
    store.delete(plan.path(STATE_FOLDER))
    return manifest


@contextlib.contextmanager
def _state_servers(
    config: RetrainConfig, extract_plan: StagePlan, store: Store, verifier: Verifier
) -> Iterator[list[str]]:
    """URLs of the servers that make hidden states; none when the store has all of them."""
    if extract_plan.finished(store) is not None:
        yield []
    elif config.extract.endpoints:
        yield config.extract.endpoints
    else:
        with Capture(config, extract_plan, store, verifier).server("vllm-online", online=True) as server:
            yield [server.url]


def _run(
    config: RetrainConfig,
    job_file: Path,
    log_file: Path,
    progress: Progress,
    on_metrics: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run torchrun to its end; the figures that rank 0 reported."""
    errors: list[dict[str, Any]] = []
    figures: dict[str, Any] | None = None
    events: queue.Queue[dict[str, Any]] = queue.Queue()

    def on_line(line: str) -> None:
        if (event := parse_event(line)) is not None:
            events.put(event)

    with ManagedProcess(
        _command(config, job_file), name="training", log_file=log_file, env=_environment(config), on_line=on_line
    ) as process:
        for event in _until_end(process, events):
            kind = event.pop("kind")
            if kind == "started":
                progress.start("training", event["steps"], "steps")
                progress.update(event["step"])
            elif kind == "metrics":
                on_metrics(event)
                shown = {name: round(event[name], 3) for name in _SHOWN if name in event}
                progress.update(event["step"], **shown)
            elif kind == "finished":
                figures = event["figures"]
            elif kind == "error":
                errors.append(event)
        status, tail = process.wait(), process.tail(200)
    progress.finish()
    if status != 0 or figures is None:
        raise TrainingError(_explain(errors, tail, status, log_file))
    return figures


def _until_end(process: ManagedProcess, events: queue.Queue[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events as they come, up to the last one of a process that has ended; the caller's thread handles them."""
    while process.running:
        with contextlib.suppress(queue.Empty):
            yield events.get(timeout=0.2)
    process.wait()
    while not events.empty():
        yield events.get()


def _command(config: RetrainConfig, job_file: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={config.train.processes}",
        "--max-restarts=0",
        "-m",
        "speculators.training.worker",
        str(job_file),
    ]


def _environment(config: RetrainConfig) -> dict[str, str]:
    """Threads are shared out among the ranks, which talk over the loopback device."""
    root = str(Path(speculators.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    threads = max(1, len(os.sched_getaffinity(0)) // config.train.processes)
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _explain(errors: list[dict[str, Any]], tail: list[str], status: int, log_file: Path) -> str:
    """One message that names the rank that failed first and why, whatever the others said after it."""
    go_on = f"The whole log: {log_file}. Saved state is kept; run again to go on from it."
    first = next((e for e in errors if not e["lost_peer"]), None)
    if first is not None:
        what = first["message"] if first["for_user"] else f"{first['type']}: {first['message']}"
        return f"Training failed on rank {first['rank']}: {what}\n{go_on}"
    root_cause = "\n".join(tail).rpartition("Root Cause")[2]
    if (found := _FAILED_RANK.search(root_cause)) is not None and int(found[2]) < 0:
        name = signal.Signals(-int(found[2])).name
        hint = " (often the kernel's answer to a lack of memory)" if name == "SIGKILL" else ""
        return f"Training failed: rank {found[1]} was ended by {name}{hint}.\n{go_on}"
    lines = "\n".join(f"  {line}" for line in tail[-_TAIL_LINES:])
    return f"Training failed: torchrun ended with status {status}.\n{go_on} Its last lines:\n{lines}"
