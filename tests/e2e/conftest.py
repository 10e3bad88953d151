"""The whole flow as a user runs it: in a process of its own, against real servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.conftest import ROOT, descendants, free_port, wait_gone

# Small enough for minutes on two cores; every stage still does its real work.
TINY = {
    "regenerate": {"max_prompts": 60, "max_tokens": 24, "concurrency": 16},
    "prepare": {"held_out_prompts": 6, "validation_prompts": 4, "draft_vocab_size": 2048, "max_length": 256},
    "serving": {"max_model_len": 320, "max_num_seqs": 16, "cpu_kv_cache_gib": 1},
    "extract": {"shard_mib": 1},
    "train": {"epochs": 4, "tokens_per_batch": 256, "checkpoint_every_steps": 4},
    "evaluate": {"max_tokens": 24},
}


@dataclass
class FlowProcess:
    """The flow, running as ``python -m flows.retrain``."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 1200) -> int:
        return self.process.wait(timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 600) -> None:
        """Wait for something to happen while the flow runs; fails when it ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the flow ended before it was interrupted:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"timed out:\n{self.output()[-4000:]}"
            time.sleep(0.05)

    def interrupt(self, how: signal.Signals) -> list[psutil.Process]:
        """Send a signal; returns the processes that are still there half a minute later."""
        below = descendants(self.process.pid)
        assert below, "nothing was running below the flow"
        self.process.send_signal(how)
        self.process.wait(60)
        return wait_gone(below)


@pytest.fixture(scope="session")
def prefect_api(start_service: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> str:
    """API URL of a Prefect server in a process of its own."""
    port = free_port()
    start_service(
        "prefect",
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        f"http://127.0.0.1:{port}/api/health",
        {"PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
    )
    return f"http://127.0.0.1:{port}/api"


@pytest.fixture(scope="session")
def start_flow(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FlowProcess]:
    """Start the flow with a configuration; the verifier comes from the project's work folder."""
    folder = tmp_path_factory.mktemp("flows")

    def start(config: dict[str, object], env: dict[str, str] | None = None) -> FlowProcess:
        number = len(list(folder.glob("*.yaml")))
        file, log = folder / f"{number}.yaml", folder / f"{number}.log"
        file.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "PREFECT_API_URL": prefect_api, **(env or {})}
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.retrain", "--config", str(file)],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return FlowProcess(process, log)

    return start
