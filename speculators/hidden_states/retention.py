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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from speculators.errors import StoreError
from speculators.hidden_states.format import INDEX_FILE, SHARDS
from speculators.manifest import MANIFEST_NAME, STAGE_FOLDERS, Manifest, Stage, StagePlan
from speculators.store import TEMPORARY_MARK, Store

logger = logging.getLogger(__name__)
LEASES, DELETIONS, LAST_USED_FILE, RETIRED_FILE = "leases", "deletions", "last_used.json", "retired.json"
HEARTBEAT_S = 15.0
WATCHED_BEATS = 2.5  # a lease that does not change for so many heartbeats is stale
ABANDONED_BEATS = 6.0  # a marker; more than a lease, since its deleter may be in the middle of its work
_LOOKS_A_BEAT = 10
_SETS = STAGE_FOLDERS[Stage.EXTRACT]
_DAY_S = 86400.0


@dataclass(frozen=True)
class RetentionPolicy:
    """Which sets are deleted. Sets that a running job uses never are.

    Attributes:
        after_training: What becomes of a set once a drafter has been trained on it.
        max_age_days: Sets that were neither written nor used for longer are deleted; None for no limit.
        max_total_gib: The least recently used sets are deleted until the others take no more; None for no limit.
    """

    after_training: Literal["keep", "delete"] = "keep"
    max_age_days: float | None = None
    max_total_gib: float | None = None


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
    store: Store, policy: RetentionPolicy, keep: Collection[str] = (), now: float | None = None
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
