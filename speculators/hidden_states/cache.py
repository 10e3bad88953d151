"""A local cache of byte ranges of a remote store, shared by all processes of a machine, with a limit on its bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from speculators.store import TEMPORARY_MARK, write_atomic


class RangeCache:
    """Files of byte ranges; the ones that were not used for longest go first when the limit is reached.

    Args:
        folder: Where they lie.
        limit_bytes: Most bytes in the folder, over all processes that share it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str, start: int, end: int, fetch: Callable[[], bytes]) -> bytes:
        """Bytes ``start`` to ``end`` of the cached piece ``name``; ``fetch`` gets the piece where it is not there.

        Of several threads and processes that miss the same piece at once, one fetches it.
        """
        path = self._folder / name
        if (found := self._look_up(path, start, end)) is not None:
            return found
        with FileLock(self._folder / f".{name}.lock"):
            if (found := self._look_up(path, start, end)) is not None:
                return found
            data = fetch()
            if len(data) <= self._limit:
                self._make_room(len(data))
                with contextlib.suppress(OSError):  # a full disk makes reading slower, not impossible
                    write_atomic(path, data)
            return data[start:end]

    def forget(self, name: str) -> None:
        """Remove a piece, if it is there."""
        (self._folder / name).unlink(missing_ok=True)

    @staticmethod
    def _look_up(path: Path, start: int, end: int) -> bytes | None:
        try:
            with open(path, "rb") as file:
                os.utime(file.fileno())
                return os.pread(file.fileno(), end - start, start)
        except FileNotFoundError:
            return None

    def _make_room(self, size: int) -> None:
        with FileLock(self._folder / ".lock"):
            pieces = [(entry.stat(), entry.path) for entry in os.scandir(self._folder) if self._is_piece(entry.name)]
            held = sum(stat.st_size for stat, _ in pieces)
            for stat, path in sorted(pieces, key=lambda piece: piece[0].st_mtime_ns):
                if held + size <= self._limit:
                    return
                os.unlink(path)
                held -= stat.st_size

    @staticmethod
    def _is_piece(name: str) -> bool:
        return not name.endswith(".lock") and TEMPORARY_MARK not in name
