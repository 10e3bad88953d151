"""How long sets of hidden states stay in the store, and how one is deleted without being taken from a running job.

A job that uses a set holds a *lease*, ``leases/<id>.json``; whoever deletes a set holds a *marker*,
``deletions/<id>.json``. A thread of the holder raises the counter in either every few seconds. Nobody compares clocks:
a file whose counter does not change while somebody watches it belongs to a process that was killed.

A job writes its lease, then looks for markers and waits until there is none. A deleter writes its marker, then looks
for leases and gives up if one is kept up. Whichever writes second sees the other, provided that the store shows a file
to everybody once it is written, as local folders and S3 do. Every holder has a file of its own, so that nobody can
remove or overwrite another one's by mistake.

The manifest goes first: a set that was deleted in part is not whole, and the next deleter or extraction gets over it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from speculators.config import RetentionConfig
from speculators.errors import StoreError
from speculators.hidden_states.format import INDEX_FILE, SHARDS
from speculators.manifest import MANIFEST_NAME, STAGE_FOLDERS, Manifest, Stage, StagePlan
from speculators.store import Store

logger = logging.getLogger(__name__)
LEASES, DELETIONS, LAST_USED_FILE, RETIRED_FILE = "leases", "deletions", "last_used.json", "retired.json"
HEARTBEAT_S = 15.0
WATCHED_BEATS = 2.5  # a lease that does not change for so many heartbeats is stale
ABANDONED_BEATS = 6.0  # a marker; more than a lease, since its deleter may be in the middle of its work
_LOOKS_A_BEAT = 10
_TRIES = 5
_SETS = STAGE_FOLDERS[Stage.EXTRACT]
_DAY_S = 86400.0


@dataclass(frozen=True)
class StateSet:
    """A set of hidden states in the store, finished or not.

    Attributes:
        directory: Its folder.
        bytes: Of all its files.
        finished: Whether it has a manifest.
        last_used: When it was last written or used, in seconds since 1970 by the store's clock.
    """

    directory: str
    bytes: int
    finished: bool
    last_used: float


@dataclass(frozen=True)
class Outcome:
    """What became of a set: ``skipped`` is one that should have gone but is in use, ``failed`` one with an error."""

    directory: str
    bytes: int
    action: Literal["deleted", "kept", "skipped", "failed"]
    reason: str


@contextmanager
def lease(store: Store, states: StagePlan | str) -> Iterator[None]:
    """Keep a set of hidden states from being deleted; it may not be there yet.

    Waits while the set is being deleted. So only what is looked for within the lease is sure to stay, the manifest
    included. Notes the time of use at the end.

    Args:
        states: The extraction, or the set's folder in the store.

    Raises:
        StoreError: The lease cannot be written.
    """
    directory = states if isinstance(states, str) else states.directory
    with _Beacon(store, f"{directory}/{LEASES}") as beacon:
        _wait_for_deleters(store, directory)
        try:
            yield
        finally:
            _note_use(store, directory, beacon)
    _remove_empty_folders(store, directory)


def retire(store: Store, directory: str, patience_s: float | None = None) -> bool:
    """Delete a set of hidden states unless a running job uses it.

    ``retired.json`` stays and says what the set was, see :func:`retired`.

    Args:
        directory: The set's folder in the store.
        patience_s: How long to watch leases for a sign of life; None for 2.5 heartbeats. Without leases nothing is
            waited for.

    Returns:
        Whether the set is gone. If not, the log says who uses it.

    Raises:
        StoreError: ``directory`` is no set's folder, or the store cannot be read or written. What is left does not
            count as whole, and another call deletes it.
    """
    obstacle = _retire(store, directory, patience_s)
    if obstacle is not None:
        logger.info("%s is not deleted: %s.", store.url_of(directory), obstacle)
    return obstacle is None


def retired(store: Store, plan: StagePlan) -> Manifest | None:
    """The manifest, without its files, of a finished set that has been deleted; None if there is no such set.

    With it, a retraining whose drafter has been trained needs no second extraction.

    Raises:
        StoreError: The store cannot be read.
    """
    if store.exists(plan.path(MANIFEST_NAME)) or not store.exists(plan.path(RETIRED_FILE)):
        return None
    return Manifest.model_validate(store.read_json(plan.path(RETIRED_FILE)))


def sets(store: Store) -> list[StateSet]:
    """All sets of hidden states in the store, the least recently used one first.

    Raises:
        StoreError: The store cannot be listed.
    """
    return _sets_below(store, _SETS)


def apply_policy(
    store: Store, policy: RetentionConfig, keep: Collection[str] = (), now: float | None = None
) -> list[Outcome]:
    """Delete the sets that are unused for too long, then the least recently used ones that are too much.

    An error with one set does not keep the others from being deleted.

    Args:
        keep: Folders of sets that stay whatever the policy says; they count for ``max_total_gib``.
        now: Seconds since 1970; None for this machine's clock. It is compared with the store's: minutes between them
            do not matter for ages of days.

    Returns:
        What became of each set, the least recently used one first.

    Raises:
        StoreError: The store cannot be listed.
    """
    now = time.time() if now is None else now
    outcomes: list[Outcome] = []
    left = found = sets(store)
    total = sum(state.bytes for state in found)
    for rule in (_age_rule(policy, now), _size_rule(policy)):
        next_left = []
        for state in left:
            reason = None if state.directory in keep else rule(state, total)
            if reason is None:
                next_left.append(state)
                continue
            outcomes.append(_outcome(store, state, reason))
            total -= state.bytes if outcomes[-1].action == "deleted" else 0
        left = next_left
    outcomes += [Outcome(state.directory, state.bytes, "kept", _kept_reason(state, keep)) for state in left]
    return outcomes


def after_training(store: Store, directory: str, policy: RetentionConfig) -> Outcome:
    """What ``policy.after_training`` says for a set, done to it.

    Args:
        directory: Folder of the set that a drafter has been trained on. The caller must hold no lease of it any more.

    Raises:
        StoreError: The store cannot be listed.
    """
    state = next(iter(_sets_below(store, directory)), StateSet(directory, 0, False, 0.0))
    if policy.after_training == "keep":
        return Outcome(directory, state.bytes, "kept", "sets stay after training")
    return _outcome(store, state, "a drafter has been trained on it")


_Rule = Callable[[StateSet, int], str | None]


def _age_rule(policy: RetentionConfig, now: float) -> _Rule:
    def rule(state: StateSet, total: int) -> str | None:
        days = (now - state.last_used) / _DAY_S
        too_old = policy.max_age_days is not None and days > policy.max_age_days
        return f"unused for {days:.1f} days, more than {policy.max_age_days:g}" if too_old else None

    return rule


def _size_rule(policy: RetentionConfig) -> _Rule:
    def rule(state: StateSet, total: int) -> str | None:
        too_much = policy.max_total_gib is not None and total > policy.max_total_gib * 2**30
        return f"least recently used while all took more than {policy.max_total_gib:g} GiB" if too_much else None

    return rule


def _outcome(store: Store, state: StateSet, reason: str) -> Outcome:
    """Try to delete a set, and say what came of it."""
    try:
        obstacle = _retire(store, state.directory)
    except StoreError as error:
        return Outcome(state.directory, state.bytes, "failed", str(error))
    if obstacle is not None:
        return Outcome(state.directory, state.bytes, "skipped", obstacle)
    return Outcome(state.directory, state.bytes, "deleted", reason)


class _Beacon:
    """A file of its own in a folder whose counter rises as long as this process lives.

    Raises:
        StoreError: It cannot be written at the start. Later errors are logged, and the next heartbeat tries again.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self.path = store, f"{folder}/{uuid.uuid4().hex}.json"
        self._counter = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name=f"heartbeat-{folder}", daemon=True)

    def __enter__(self) -> _Beacon:
        for tries_left in reversed(range(_TRIES)):
            try:
                self._beat()
                break
            except StoreError as error:
                # A deleter may remove the empty folder just as it is written into.
                if not tries_left or not _is_missing(error):
                    raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._store.delete(self.path)
        except StoreError as problem:
            logger.warning("%s stays behind and will be taken for stale: %s", self._store.url_of(self.path), problem)

    def is_there(self) -> bool:
        """Whether nobody has taken this process for dead and removed the file."""
        return self._store.exists(self.path)

    def _beat(self) -> None:
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._store.write_json(self.path, {"holder": holder, "counter": self._counter})
        self._counter += 1

    def _keep_up(self) -> None:
        pause = HEARTBEAT_S
        while not self._ended.wait(pause):
            try:
                if not self.is_there():
                    logger.error(
                        "%s is gone: this process did not reach the store for so long that another one took it for"
                        " dead. The set that it stands for may have been deleted.",
                        self._store.url_of(self.path),
                    )
                    return
                self._beat()
                pause = HEARTBEAT_S
            except Exception as error:  # a thread that ended would let the set go
                logger.warning("A heartbeat failed and is tried again: %s", error)
                pause = HEARTBEAT_S / _LOOKS_A_BEAT


def _is_missing(error: StoreError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def _beacons(store: Store, *folders: str) -> dict[str, bytes]:
    """Content of every lease or marker in some folders, by path."""
    # Twice: a file that a heartbeat replaces may be missing from one listing of a local folder, not from both.
    paths = {path for folder in folders * 2 for path in store.list(folder)}
    found: dict[str, bytes] = {}
    for path in sorted(paths):
        try:
            found[path] = store.read_bytes(path)
        except StoreError as error:
            if not _is_missing(error):
                raise
    return found


def _holder(content: bytes) -> str:
    return str(json.loads(content)["holder"])


def _wait_for_deleters(store: Store, directory: str) -> None:
    """Wait until nobody deletes the set; a marker that nobody keeps up is removed."""
    changed: dict[str, tuple[bytes, float]] = {}
    while markers := _beacons(store, f"{directory}/{DELETIONS}"):
        for path, content in markers.items():
            if path not in changed:
                logger.info("Waiting: %s is being deleted by %s.", store.url_of(directory), _holder(content))
            if path not in changed or changed[path][0] != content:
                changed[path] = content, time.monotonic()
            elif time.monotonic() - changed[path][1] > ABANDONED_BEATS * HEARTBEAT_S:
                logger.warning("The deletion of %s was abandoned; going on.", store.url_of(directory))
                store.delete(path)
        time.sleep(HEARTBEAT_S / _LOOKS_A_BEAT)


def _note_use(store: Store, directory: str, beacon: _Beacon) -> None:
    """Note the time of use, where there is a set; the file's own time, by the store's clock, is what counts."""
    try:
        is_set = any(not path.startswith(f"{directory}/{LEASES}/") for path in store.list(directory))
        if is_set and beacon.is_there():
            used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            store.write_json(f"{directory}/{LAST_USED_FILE}", {"time": used})
    except StoreError as error:  # the job has done its work
        logger.warning("The use of %s could not be noted: %s", store.url_of(directory), error)


def _retire(store: Store, directory: str, patience_s: float | None = None) -> str | None:
    """Delete a set; returns why not where it stays."""
    if not re.fullmatch(rf"{_SETS}/[^/]+", directory):
        raise StoreError(f"{store.url_of(directory)} is no set of hidden states: it must be {_SETS}/<fingerprint>.")
    patience = WATCHED_BEATS * HEARTBEAT_S if patience_s is None else patience_s
    with _Beacon(store, f"{directory}/{DELETIONS}") as marker:
        obstacle, stale = _watch(store, directory, marker.path, patience)
        if obstacle is None:
            obstacle = _delete(store, directory, marker, stale)
    _remove_empty_folders(store, directory)
    return obstacle


def _watch(store: Store, directory: str, own: str, patience_s: float) -> tuple[str | None, list[str]]:
    """Look for leases, and for markers other than our ``own``, that are kept up.

    Returns:
        What one of them stands for, None where there is none; and the paths of those that are stale.
    """
    deadline = time.monotonic() + patience_s
    first: dict[str, bytes] | None = None
    while True:
        found = _beacons(store, f"{directory}/{LEASES}", f"{directory}/{DELETIONS}")
        found.pop(own, None)
        first = found if first is None else first
        for path, content in found.items():
            if first.get(path) != content:
                verb = "used" if path.startswith(f"{directory}/{LEASES}/") else "being deleted"
                return f"it is {verb} by {_holder(content)}", []
        if not found or time.monotonic() >= deadline:
            return None, list(found)
        time.sleep(min(HEARTBEAT_S / _LOOKS_A_BEAT, max(deadline - time.monotonic(), 0.0)))


def _delete(store: Store, directory: str, marker: _Beacon, stale: list[str]) -> str | None:
    """Delete the set's files, the manifest first; leases that are not stale stay, since a job waits behind them."""
    _record(store, directory)
    first = [MANIFEST_NAME, INDEX_FILE, SHARDS]
    others = sorted(_names(store, directory) - {*first, RETIRED_FILE, LEASES, DELETIONS})
    for path in [*(f"{directory}/{name}" for name in [*first, *others]), *stale]:
        if not marker.is_there():
            return "another process took this one for dead, and may use the set"
        store.delete(path)
    store.abort_uploads(f"{directory}/{SHARDS}")
    if not store.is_local:
        shutil.rmtree(store.cache_dir / directory, ignore_errors=True)  # what HiddenStateReader has fetched
    return None


def _names(store: Store, directory: str) -> set[str]:
    """What lies right in a set's folder; in a local one also what a listing does not show."""
    if store.is_local:
        return set(os.listdir(store.full_path(directory)))
    return {path.removeprefix(f"{directory}/").partition("/")[0] for path in store.list(directory)}


def _record(store: Store, directory: str) -> None:
    """Note what a finished set was."""
    try:
        manifest = store.read_json(f"{directory}/{MANIFEST_NAME}")
    except StoreError as error:
        if isinstance(error.__cause__, (FileNotFoundError, ValueError)):
            return  # it was never finished, or is damaged
        raise
    store.write_json(f"{directory}/{RETIRED_FILE}", {**manifest, "outputs": {}})


def _remove_empty_folders(store: Store, directory: str) -> None:
    if store.is_local:
        for folder in (f"{directory}/{LEASES}", f"{directory}/{DELETIONS}", directory):
            with contextlib.suppress(OSError):  # it is not empty
                Path(store.full_path(folder)).rmdir()


def _sets_below(store: Store, prefix: str) -> list[StateSet]:
    """The sets whose files lie below a prefix, the least recently used one first."""
    try:
        files = store.fs.find(store.full_path(prefix), detail=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"Cannot list {store.url_of(prefix)}: {error}") from error
    by_set: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for path, details in files.items():
        _, name, *inside = path[len(store.root) + 1 :].split("/")
        # What deleters leave behind neither makes a set nor uses it.
        if inside and inside[0] != DELETIONS and inside != [RETIRED_FILE]:
            by_set[f"{_SETS}/{name}"]["/".join(inside)] = details
    found = [
        StateSet(
            directory,
            bytes=sum(int(details["size"]) for details in inside.values()),
            finished=MANIFEST_NAME in inside,
            last_used=max(_modified(details) for details in inside.values()),
        )
        for directory, inside in by_set.items()
    ]
    return sorted(found, key=lambda state: state.last_used)


def _modified(details: dict[str, Any]) -> float:
    """When a file was written, by the store's clock: a local one's time in seconds, S3's as a datetime."""
    time_of = details["mtime"] if "mtime" in details else details["LastModified"]
    return time_of.timestamp() if isinstance(time_of, datetime) else float(time_of)


def _kept_reason(state: StateSet, keep: Collection[str]) -> str:
    return "to be kept" if state.directory in keep else "within the limits"
