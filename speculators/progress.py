"""Progress of long work, shown where the caller wants it: a terminal bar, Prefect, or nowhere."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class Progress:
    """Receives progress; this base class shows nothing."""

    def start(self, description: str, total: int, unit: str) -> None:
        """A piece of work begins: ``total`` pieces, each called ``unit``."""

    def update(self, done: int, total: int | None = None, **figures: Any) -> None:
        """``done`` of the pieces are finished; ``figures`` are shown beside (loss, tokens/s, ...)."""

    def finish(self) -> None:
        """The work that :meth:`start` announced has ended."""


class TerminalProgress(Progress):
    """A tqdm bar with rate and time left; on a pipe it prints a line every few seconds instead of redrawing."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def start(self, description: str, total: int, unit: str) -> None:
        self.finish()
        self._bar = tqdm(total=total, desc=description, unit=f" {unit}", dynamic_ncols=True, mininterval=1.0)

    def update(self, done: int, total: int | None = None, **figures: Any) -> None:
        if self._bar is None:
            return
        if total is not None:
            self._bar.total = total
        if figures:
            self._bar.set_postfix(figures, refresh=False)
        self._bar.update(done - self._bar.n)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
