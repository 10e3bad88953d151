"""Fixtures shared by all tests: the real verifier, real servers, and how to find processes left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from speculators import stages
from speculators.config import RetrainConfig
from speculators.progress import TerminalProgress
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store
from speculators.verifier import Verifier, resolve_verifier

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("SPECULATORS_SERVING_PYTHON", str(ROOT / ".venv-serving" / "bin" / "python"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def verifier() -> Verifier:
    """SmolLM2-135M-Instruct, dequantised once into the project's work folder and kept between test runs."""
    return resolve_verifier(RetrainConfig(work_dir=str(ROOT / "work")))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty local store."""
    return Store(tmp_path / "store", cache_dir=tmp_path / "cache")


@pytest.fixture
def progress() -> TerminalProgress:
    """A progress bar that goes to the captured output."""
    return TerminalProgress()


@pytest.fixture(scope="session")
def plain_server(verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Real vLLM serving the verifier without a drafter, shared by all tests that need one."""
    config = RetrainConfig()
    with VllmServer(config.serving, verifier.path, tmp_path_factory.mktemp("plain-server"), name="plain") as server:
        yield server


@pytest.fixture(scope="session")
def small_retraining(
    verifier: Verifier, plain_server: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> stages.Retraining:
    """A small retraining, finished up to its export, whose hidden states are stored in float32."""
    folder = tmp_path_factory.mktemp("small-retraining")
    config = RetrainConfig.model_validate(
        {
            "store": str(folder / "store"),
            "work_dir": str(folder),
            "verifier": {"model": str(verifier.path)},
            "serving": {
                "max_model_len": 320,
                "max_num_seqs": 16,
                "cpu_kv_cache_gib": 1,
                "endpoints": [plain_server.url],
            },
            "regenerate": {"max_prompts": 72, "max_tokens": 32},
            "prepare": {"held_out_prompts": 6, "validation_prompts": 6, "draft_vocab_size": 2048, "max_length": 256},
            "extract": {"dtype": "float32", "shard_mib": 4},
            "train": {"epochs": 3},
        }
    )
    run = stages.open_retraining(config)
    progress = TerminalProgress()
    stages.run_regenerate(run, progress)
    stages.run_prepare(run)
    stages.run_extract(run, progress)
    stages.run_train(run, progress, lambda record: None)
    stages.run_export(run)
    return run


@pytest.fixture(scope="session")
def trained_drafter(small_retraining: stages.Retraining) -> Path:
    """Folder of a drafter that has learned a little."""
    return stages.drafter_folder(small_retraining)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Start a server process and wait until a URL of it answers; all end with the session."""
    running: list[subprocess.Popen[bytes]] = []
    folder = tmp_path_factory.mktemp("services")

    def start(name: str, command: list[str], ready_url: str, env: dict[str, str] | None = None) -> None:
        log = folder / f"{name}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **(env or {})}, stdout=output, stderr=output, cwd=folder
            )
        running.append(process)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            try:
                urllib.request.urlopen(ready_url, timeout=2)
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")

    yield start
    for process in running:
        for child in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            child.kill()


@pytest.fixture(scope="session")
def s3_endpoint(start_service: Callable[..., None]) -> str:
    """URL of a real HTTP S3 endpoint (moto's server)."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    start_service("s3", command, f"http://127.0.0.1:{port}/moto-api/")
    return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def seaweedfs_endpoint(start_service: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of another S3 server, SeaweedFS, which stores and checks as a production one does.

    Every bucket takes volumes of its own, so there must be many; they take space only when written to.
    """
    folder = tmp_path_factory.mktemp("seaweedfs")
    keys = {"accessKey": "test-key-id", "secretKey": "test-secret-key"}
    identity = {"name": "test", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    ports = {name: free_port() for name in [*names, "s3.port", "s3.port.grpc"]}
    options = {
        **ports,
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 1000,
        "volume.minFreeSpace": 1,
        "volume.preStopSeconds": 0,
        "s3.config": folder / "s3.json",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    weed = str(Path(sys.executable).with_name("weed"))
    command = [weed, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    url = f"http://127.0.0.1:{ports['s3.port']}"
    start_service("seaweedfs", command, url, {"GOMEMLIMIT": "400MiB"})
    return url


@pytest.fixture
def s3_bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket on the S3 endpoint, with the environment pointing there."""
    return make_bucket(s3_endpoint, monkeypatch)


def make_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket on an S3 server, with the environment pointing there."""
    import s3fs

    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket, deadline = f"test-{time.monotonic_ns()}", time.monotonic() + 60
    while True:
        try:
            if not s3fs.S3FileSystem().exists(bucket):
                s3fs.S3FileSystem().mkdir(bucket)
            s3fs.S3FileSystem().pipe_file(f"{bucket}/probe", b"ready")
            return bucket
        except OSError:  # a server that has just started takes no data yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def s3_environment(endpoint: str) -> dict[str, str]:
    """What a process needs to use the S3 endpoint."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test-key-id",
        "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below a process, now."""
    return psutil.Process(pid).children(recursive=True)


def wait_gone(processes: list[psutil.Process], timeout_s: float = 30) -> list[psutil.Process]:
    """Wait until processes have ended; returns those that have not."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
