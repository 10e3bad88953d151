"""vLLM's API server as a child process: started, watched, and ended with all its own children."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from speculators.config import ServingConfig
from speculators.errors import ServingError
from speculators.processes import ManagedProcess

logger = logging.getLogger(__name__)
SERVED_MODEL_NAME = "verifier"
_REPORT_EVERY_S = 15.0
_ERROR_LINE = re.compile(r"(\b\w*(?:Error|Exception)\b: .+)|(\berror: .+)|(No module named .+)")
_NOT_THE_CAUSE = ("Engine core initialization failed", "See root cause above", " WARNING ")


def serving_python(serving: ServingConfig) -> Path:
    """The interpreter of the environment that holds vLLM.

    Raises:
        ServingError: There is none; says how to make it.
    """
    named = serving.python or os.environ.get("SPECULATORS_SERVING_PYTHON") or ".venv-serving/bin/python"
    path = Path(named)
    if not path.is_file():
        raise ServingError(
            f"The serving environment's interpreter {named} does not exist. Make it with `make install`, or set"
            " serving.python or SPECULATORS_SERVING_PYTHON to the Python of an environment that holds vLLM 0.32."
        )
    return path.absolute()


def triton_interpreter(serving: ServingConfig) -> dict[str, str]:
    """Environment variables that let vLLM on a CPU run what needs Triton: slowly, for checks.

    Raises:
        ServingError: Triton is not where the interpreter's copy belongs; says how to put it there.
    """
    folder = serving_python(serving).parent.parent / "triton-interpreter"
    if not folder.is_dir():
        raise ServingError(
            f"{folder} does not exist: this drafter needs Triton's interpreter on a machine without a GPU. Make it with"
            f" `make install`, or: pip install --no-deps --target {folder} triton==3.8.0"
        )
    return {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"}


class VllmServer:
    """vLLM's OpenAI-compatible server on a free local port; use it as ``with``.

    Args:
        serving: How to serve.
        model: Checkpoint folder or hub id; a drafter's folder serves its verifier with the drafter.
        work_dir: Logs go to its ``logs`` folder.
        name: Names the log.
        address: Host and port to listen on; None for a free port of this machine that only it can reach.
        extra_args: Arguments of this use, before the configuration's own ``extra_args``.
        env: Environment variables of this use.

    Raises:
        ServingError: On entering: vLLM did not start; holds the cause from its log, and the log's path.
    """

    def __init__(
        self,
        serving: ServingConfig,
        model: Path | str,
        work_dir: Path,
        *,
        name: str,
        address: tuple[str, int] | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._serving, self._model, self.name, self._address = serving, str(model), name, address
        self._arguments = [*extra_args, *serving.extra_args]
        self._env = dict(env or {})
        self.log_file = work_dir / "logs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self._process: ManagedProcess | None = None
        self.url = ""
        self.command: list[str] = []

    def __enter__(self) -> VllmServer:
        python = serving_python(self._serving)
        host, port = self._address or ("127.0.0.1", _free_port())
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        self.command = self._command(python, host, port)
        self._process = ManagedProcess(self.command, name=self.name, log_file=self.log_file, env=self._environment())
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and all its children. May be called more than once."""
        if self._process is not None:
            self._process.stop()

    def check_alive(self) -> None:
        """Raises:
        ServingError: The server has died.
        """
        if self._process is None or not self._process.running:
            raise ServingError(f"vLLM ({self.name}) died: {self._cause()}")

    def _command(self, python: Path, host: str, port: int) -> list[str]:
        serving = self._serving
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        command += ["--served-model-name", SERVED_MODEL_NAME, "--host", host, "--port", str(port)]
        command += ["--dtype", serving.dtype, "--max-model-len", str(serving.max_model_len)]
        command += ["--max-num-seqs", str(serving.max_num_seqs), "--generation-config", "vllm"]
        command += ["--tensor-parallel-size", str(serving.tensor_parallel_size)]
        if serving.device == "cpu":
            command.append("--enforce-eager")
        else:
            command += ["--gpu-memory-utilization", str(serving.gpu_memory_utilization)]
        return [*command, *self._arguments]

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
        if Path(self._model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if self._serving.device == "cpu":
            env["VLLM_CPU_KVCACHE_SPACE"] = str(self._serving.cpu_kv_cache_gib)
            # Left alone, vLLM reserves one core for itself: half of a two-core machine.
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores_of_ranks(self._serving.tensor_parallel_size))
        for leaking in ("VIRTUAL_ENV", "PYTHONHOME"):
            env.pop(leaking, None)
        return {**env, **self._env}

    def _wait_ready(self) -> None:
        assert self._process is not None
        started = reported = time.monotonic()
        logger.info("vLLM is starting (%s); its log: %s", self.name, self.log_file)
        while True:
            if not self._process.running:
                raise ServingError(f"vLLM ({self.name}) did not start: {self._cause()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    logger.info("vLLM is ready after %.0f s", time.monotonic() - started)
                    return
            except httpx.TransportError:
                pass
            now = time.monotonic()
            if now - started > self._serving.startup_timeout_s:
                raise ServingError(
                    f"vLLM ({self.name}) was not ready within serving.startup_timeout_s"
                    f" ({self._serving.startup_timeout_s:.0f} s). Raise it, or see {self.log_file}."
                )
            if now - reported > _REPORT_EVERY_S:
                logger.info("vLLM is starting (%.0f s) ...", now - started)
                reported = now
            time.sleep(0.5)

    def _cause(self) -> str:
        """The first error in the log that names a cause, and where to read more."""
        assert self._process is not None
        self._process.wait(10)
        lines = self._process.tail(1000)
        causes = [
            m[0] for line in lines if (m := _ERROR_LINE.search(line)) and not any(x in line for x in _NOT_THE_CAUSE)
        ]
        if any("No module named 'vllm'" in cause for cause in causes):
            causes = [
                f"the serving environment has no vLLM ({serving_python(self._serving)}). Make it with `make install`"
            ]
        cause = causes[0].strip() if causes else "\n".join(lines[-5:]) or "no output"
        status = self._process.returncode
        killed = " (killed: out of memory?)" if status == 128 + 9 else ""
        return f"{cause}\n  exit status {status}{killed}; the whole log: {self.log_file}"


def _cores_of_ranks(ranks: int) -> str:
    """All cores, shared out among the ranks, as vLLM reads it: ``0-3`` or ``0-1|2-3``."""
    cores = os.cpu_count() or 1
    each = max(1, cores // ranks)
    starts = [rank * each % cores for rank in range(ranks)]
    return "|".join(f"{start}-{start + each - 1}" for start in starts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
