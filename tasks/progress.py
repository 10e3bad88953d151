"""Progress of a stage in the Prefect UI and in the terminal at once."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from types import TracebackType
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from speculators.progress import TerminalProgress

logger = logging.getLogger(__name__)
_INTERVAL_S = 5.0


class PrefectProgress(TerminalProgress):
    """A terminal bar whose state a thread copies into Prefect progress artifacts every few seconds.

    The thread keeps calls to the Prefect API out of the stage's own loop: a slow or missing API server slows nothing,
    and stages that run asyncio are not entered from within.

    Args:
        key: Artifact key prefix; one artifact for each piece of work that the stage announces.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self._lock = threading.Lock()
        self._state: dict[str, tuple[float, str]] = {}
        self._artifacts: dict[str, Any] = {}
        self._sent: dict[str, tuple[float, str]] = {}
        self._current: tuple[str, int, str] | None = None
        self._closing = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._publish), name=f"progress-{key}", daemon=True)

    def __enter__(self) -> PrefectProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        self._closing.set()
        self._thread.join(timeout=30)

    def start(self, description: str, total: int, unit: str) -> None:
        super().start(description, total, unit)
        with self._lock:
            self._current = (description, total, unit)
            self._state[description] = (0.0, f"0 of {total} {unit}")

    def update(self, done: int, total: int | None = None, **figures: Any) -> None:
        super().update(done, total, **figures)
        with self._lock:
            if self._current is None:
                return
            description, known, unit = self._current
            total = total or known
            self._current = (description, total, unit)
            shown = "".join(f", {name} {value}" for name, value in figures.items())
            self._state[description] = (100.0 * done / max(total, 1), f"{done} of {total} {unit}{shown}")

    def _publish(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self._send()
        self._send()

    def _send(self) -> None:
        with self._lock:
            state = dict(self._state)
        for description, (percent, text) in state.items():
            if self._sent.get(description) == (percent, text):
                continue
            try:
                if description not in self._artifacts:
                    key = re.sub(r"[^a-z0-9]+", "-", f"{self._key}-{description}".lower()).strip("-")
                    self._artifacts[description] = create_progress_artifact(percent, key=key, description=text)
                else:
                    update_progress_artifact(self._artifacts[description], percent, description=text)
                self._sent[description] = (percent, text)
            except Exception as error:  # the work goes on without its picture in the UI
                logger.debug("Prefect progress artifact not updated: %s", error)
