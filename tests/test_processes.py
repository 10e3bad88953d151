"""Nothing that a managed command starts outlives it, or the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from speculators.processes import ManagedProcess

# Ignores SIGTERM, and leaves a grandchild in a session of its own behind.
STUBBORN = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import os,time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
                      "print('daemon', os.getpid(), flush=True)\\ntime.sleep(600)"])
    print("up", os.getpid(), flush=True)
    time.sleep(600)
    """
)


def wait_for(log: Path, words: list[str], timeout_s: float = 20) -> dict[str, int]:
    """Process ids printed after each word."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = dict(line.split() for line in log.read_text().splitlines()) if log.exists() else {}
        if all(word in found for word in words):
            return {word: int(found[word]) for word in words}
        time.sleep(0.05)
    pytest.fail(f"did not start: {log.read_text() if log.exists() else 'no log'}")


def assert_gone(pids: list[int], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if psutil.pid_exists(p)]}"
        time.sleep(0.1)


def test_output_exit_status_and_log(tmp_path: Path) -> None:
    lines: list[str] = []
    process = ManagedProcess(
        [sys.executable, "-c", "print('one'); import sys; print('two', file=sys.stderr); sys.exit(7)"],
        name="t",
        log_file=tmp_path / "log",
        on_line=lines.append,
    )
    assert process.wait(20) == 7
    assert process.returncode == 7
    assert not process.running
    assert sorted(lines) == ["one", "two"]
    assert sorted(process.tail()) == ["one", "two"]
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    process = ManagedProcess(["/no/such/program"], name="t", log_file=tmp_path / "log")
    assert process.wait(20) == 127
    assert "cannot start /no/such/program" in process.tail()[0]


def test_death_by_signal_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert ManagedProcess(command, name="t", log_file=tmp_path / "log").wait(20) == 128 + 9


def test_stop_ends_stubborn_daemons(tmp_path: Path) -> None:
    with ManagedProcess([sys.executable, "-c", STUBBORN], name="t", log_file=tmp_path / "log"):
        pids = wait_for(tmp_path / "log", ["up", "daemon"])
    assert_gone(list(pids.values()), 1)


def test_children_left_by_a_command_that_ended(tmp_path: Path) -> None:
    leave = "import subprocess,sys; p=subprocess.Popen(['sleep','600']); print('left', p.pid, flush=True)"
    process = ManagedProcess([sys.executable, "-c", leave], name="t", log_file=tmp_path / "log")
    assert process.wait(30) == 0
    assert_gone([wait_for(tmp_path / "log", ["left"])["left"]], 1)


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGTERM", "exit", "exception"])
def test_everything_ends_with_the_parent(tmp_path: Path, ending: str) -> None:
    parent_code = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from speculators.processes import ManagedProcess
        p = [ManagedProcess([sys.executable, "-c", {STUBBORN!r}], name=str(i), log_file=Path(sys.argv[1]) / str(i))
             for i in range(2)]
        time.sleep(3 if {ending!r} in ("exit", "exception") else 600)
        if {ending!r} == "exception":
            raise RuntimeError
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code, str(tmp_path)], stderr=subprocess.DEVNULL)
    pids = [pid for i in "01" for pid in wait_for(tmp_path / i, ["up", "daemon"]).values()]
    if ending.startswith("SIG"):
        parent.send_signal(getattr(signal, ending))
    parent.wait(30)
    assert_gone(pids)


def test_the_command_dies_with_its_supervisor(tmp_path: Path) -> None:
    process = ManagedProcess([sys.executable, "-c", STUBBORN], name="t", log_file=tmp_path / "log")
    pids = wait_for(tmp_path / "log", ["up", "daemon"])
    os.kill(process.pid, signal.SIGKILL)
    assert_gone([pids["up"]], 5)
    os.kill(pids["daemon"], signal.SIGKILL)
    process.stop()
