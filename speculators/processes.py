"""Child processes that never outlive their parent.

A command runs under a small supervisor (this file as a script, standard library only). The supervisor holds the reading
end of a pipe whose writing end only the parent has: when the parent ends, for whatever reason, SIGKILL included, the
pipe closes and the supervisor ends every descendant of the command. It is a child subreaper, so processes that a
descendant left behind are handed to it and are found too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_GRACE_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KEPT_LINES = 2000


class ManagedProcess:
    """A command whose whole tree of processes ends with this object, or with this process.

    Args:
        command: Program and arguments.
        name: Shown in messages.
        log_file: Receives the command's output, stdout and stderr together.
        env: The whole environment of the command; None for this process's own.
        cwd: Working folder of the command.
        on_line: Called in a thread of its own with each line of output, line end left out.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log_file: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.log_file = name, log_file
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(lifeline), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self._reader = threading.Thread(target=self._read, name=f"output-{name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the root of the command's tree."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The command's exit status (128 + n when signal n ended it); None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command and all of its output.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        status = self._process.wait(timeout)
        self._reader.join(timeout=_GRACE_S)
        return status

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End the command and all its descendants: SIGTERM, and SIGKILL for what is left after the grace period."""
        with self._lock:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
        try:
            self._process.wait(grace_s + _GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=_GRACE_S)

    def tail(self, count: int = 30) -> list[str]:
        """The last lines of output."""
        return list(self._lines)[-count:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        with open(self.log_file, "ab", buffering=0) as log:
            for raw in self._process.stdout:
                with contextlib.suppress(OSError):  # a full disk must not stop the command
                    log.write(raw)
                line = raw.decode(errors="replace").rstrip("\n")
                self._lines.append(line)
                if self._on_line is not None:
                    self._on_line(line)


def _supervise(lifeline: int, command: Sequence[str]) -> int:
    """Run the command until it ends, the lifeline closes or SIGTERM comes; leave no descendant behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)

    stopping = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    os.set_inheritable(lifeline, False)
    try:
        child = subprocess.Popen(list(command), preexec_fn=die_with_supervisor)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        return 127
    while child.poll() is None and not stopping:
        readable, _, _ = select.select([lifeline], [], [], 0.1)
        if readable:
            stopping = True
        _reap(child.pid)
    status = child.poll()
    _end_all(child)
    status = status if status is not None else child.wait()
    return status if status >= 0 else 128 - status


def _end_all(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all descendants, SIGKILL after the grace period, until none is left."""
    deadline = time.monotonic() + _GRACE_S
    number = signal.SIGTERM
    told: set[int] = set()
    while True:
        child.poll()
        _reap(child.pid)
        left = _descendants(os.getpid())
        if not left:
            return
        if number == signal.SIGTERM and time.monotonic() > deadline:
            number = signal.SIGKILL
            told.clear()
        for pid in left - told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
            told.add(pid)
        if number == signal.SIGKILL:
            told.clear()
        time.sleep(0.05)


def _reap(child: int) -> None:
    """Collect orphans that were handed to the supervisor; the command itself is left to its Popen."""
    for pid in _children(os.getpid()):
        if pid != child:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in found and not _is_zombie(child):
                found.add(child)
                waiting.append(child)
    return found


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[2:]))
