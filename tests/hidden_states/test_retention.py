"""Retention: what the policy says goes, what a running job uses never does, and whoever is killed blocks nobody."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.retention import retention as retention_flow
from speculators.config import RetentionConfig
from speculators.errors import StoreError
from speculators.hidden_states import retention
from speculators.hidden_states.format import INDEX_FILE, SHARDS
from speculators.hidden_states.retention import (
    DELETIONS,
    LAST_USED_FILE,
    LEASES,
    RETIRED_FILE,
    StateSet,
    after_training,
    apply_policy,
    lease,
    retire,
    retired,
    sets,
)
from speculators.manifest import MANIFEST_NAME, Stage, StagePlan
from speculators.store import Store
from tasks import retention as retention_task

DAY_S = 86400
SHARD_NAMES = [f"{SHARDS}/{n}.{end}" for n in range(2) for end in ("safetensors", "json")]


@pytest.fixture(params=["local", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return request.getfixturevalue("store")
    return Store(f"s3://{request.getfixturevalue('s3_bucket')}/prefix", cache_dir=tmp_path / "cache")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of 50 ms; a machine that is busy for a moment is not taken for a dead process."""
    monkeypatch.setattr(retention, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(retention, "WATCHED_BEATS", 60.0)
    monkeypatch.setattr(retention, "ABANDONED_BEATS", 120.0)


def stage_of(name: object) -> StagePlan:
    return StagePlan(Stage.EXTRACT, {"name": str(name)})


def make_set(store: Store, name: object, size: int = 100) -> StagePlan:
    """A finished set of about 2 * ``size`` bytes whose shards are not real ones."""
    stage = stage_of(name)
    for file in SHARD_NAMES:
        store.write_bytes(stage.path(file), b"x" * size if file.endswith(".safetensors") else b"{}")
    store.write_bytes(stage.path(INDEX_FILE), b"index")
    stage.complete(store, {INDEX_FILE: "0", **dict.fromkeys(SHARD_NAMES, "0")}, {"samples": 7})
    return stage


def missing(store: Store, stage: StagePlan) -> list[str]:
    """Files that a set does not have."""
    there = set(store.list(stage.directory))
    return [name for name in (MANIFEST_NAME, INDEX_FILE, *SHARD_NAMES) if stage.path(name) not in there]


def left(store: Store, stage: StagePlan) -> list[str]:
    """What is left of a set, but for the note of what it was."""
    return [path for path in store.list(stage.directory) if path != stage.path(RETIRED_FILE)]


def directories(states: list[StateSet]) -> list[str]:
    return [state.directory for state in states]


def tick(store: Store) -> None:
    """Wait until files get another time: S3 shows whole seconds."""
    time.sleep(0.02 if store.is_local else 1.05)


# --- policies ---------------------------------------------------------------------------------------------------------


def test_sets_are_listed_with_size_and_use(any_store: Store) -> None:
    store, before = any_store, time.time()
    assert sets(store) == []
    old = make_set(store, "old")
    tick(store)
    unfinished = stage_of("unfinished")
    store.write_bytes(unfinished.path(SHARD_NAMES[0]), b"12345")
    store.write_bytes("datasets/other/manifest.json", b"{}")
    store.write_bytes("hidden_states/a-file", b"")
    first, second = sets(store)
    assert (first.directory, first.finished) == (old.directory, True)
    assert first.bytes == sum(store.size(path) for path in store.list(old.directory))
    assert second == StateSet(unfinished.directory, 5, False, second.last_used)
    assert before - 60 < first.last_used < second.last_used < time.time() + 60
    tick(store)
    with lease(store, old):
        pass
    assert directories(sets(store)) == [unfinished.directory, old.directory]
    assert store.exists(old.path(LAST_USED_FILE))
    assert retire(store, old.directory)
    assert directories(sets(store)) == [unfinished.directory], "the note of what it was is no set"


def test_sets_unused_for_too_long_go(store: Store) -> None:
    stages = []
    for name in ("old", "kept", "recent"):
        stages.append(make_set(store, name))
        tick(store)
    old, kept_one, recent = stages
    times = {state.directory: state.last_used for state in sets(store)}
    limit = (times[kept_one.directory] + times[recent.directory]) / 2
    policy = RetentionConfig(max_age_days=14)
    assert [o.action for o in apply_policy(store, policy)] == ["kept"] * 3
    outcomes = apply_policy(store, policy, keep=[kept_one.directory], now=limit + 14 * DAY_S)
    assert [(o.directory, o.action) for o in outcomes] == [
        (old.directory, "deleted"),
        (kept_one.directory, "kept"),
        (recent.directory, "kept"),
    ]
    assert outcomes[0].reason == "unused for 14.0 days, more than 14"
    assert outcomes[0].bytes > 200
    assert left(store, old) == []
    assert missing(store, kept_one) == missing(store, recent) == []
    assert retired(store, old).figures == {"samples": 7}  # type: ignore[union-attr]
    assert retired(store, recent) is None
    make_set(store, "old")
    assert retired(store, old) is None, "it is there again"


def test_least_recently_used_sets_go_first(any_store: Store) -> None:
    store = any_store
    stages = []
    for name in range(3):
        stages.append(make_set(store, name, size=100_000))
        tick(store)
    with lease(store, stages[0]):
        pass
    size = sets(store)[0].bytes
    outcomes = apply_policy(store, RetentionConfig(max_total_gib=2.5 * size / 2**30))
    assert [(o.directory, o.action) for o in outcomes] == [
        (stages[1].directory, "deleted"),
        (stages[2].directory, "kept"),
        (stages[0].directory, "kept"),
    ]
    assert missing(store, stages[0]) == missing(store, stages[2]) == left(store, stages[1]) == []
    limit = sum(state.last_used for state in sets(store)) / 2
    outcomes = apply_policy(store, RetentionConfig(max_age_days=1), now=limit + DAY_S)
    assert [(o.directory, o.action) for o in outcomes] == [
        (stages[2].directory, "deleted"),
        (stages[0].directory, "kept"),
    ]


@pytest.mark.usefixtures("fast")
def test_what_must_stay_counts_but_makes_no_room(store: Store) -> None:
    kept_one, used, free = (make_set(store, name, size=100_000) for name in range(3))
    with lease(store, used):
        found = apply_policy(store, RetentionConfig(max_total_gib=1e-9), keep=[kept_one.directory])
    outcomes = {outcome.directory: outcome for outcome in found}
    assert [outcomes[stage.directory].action for stage in (kept_one, used, free)] == ["kept", "skipped", "deleted"]
    assert "is used by" in outcomes[used.directory].reason
    assert missing(store, kept_one) == missing(store, used) == left(store, free) == []


def test_a_set_goes_after_training_if_the_policy_says_so(any_store: Store) -> None:
    stage, other = make_set(any_store, "trained"), make_set(any_store, "other")
    assert after_training(any_store, stage.directory, RetentionConfig()).action == "kept"
    assert missing(any_store, stage) == []
    outcome = after_training(any_store, stage.directory, RetentionConfig(after_training="delete"))
    assert (outcome.action, outcome.bytes > 200) == ("deleted", True)
    assert left(any_store, stage) == missing(any_store, other) == []
    assert after_training(any_store, stage.directory, RetentionConfig(after_training="delete")).action == "deleted"


def test_without_limits_everything_stays(store: Store) -> None:
    make_set(store, "a")
    assert [o.action for o in apply_policy(store, RetentionConfig(), now=time.time() + 1e9)] == ["kept"]


class StubbornStore(Store):
    """A store some of whose files cannot be deleted."""

    stubborn = ""

    def delete(self, path: str) -> None:
        if self.stubborn and path.startswith(self.stubborn):
            raise StoreError(f"Cannot delete {path}: permission denied.")
        super().delete(path)


def test_one_set_that_cannot_be_deleted_does_not_keep_the_others(tmp_path: Path) -> None:
    store = StubbornStore(tmp_path / "store")
    first, second = make_set(store, "a"), make_set(store, "b")
    store.stubborn = first.path(SHARDS)
    outcomes = apply_policy(store, RetentionConfig(max_total_gib=0))
    assert [o.action for o in outcomes] == ["failed", "deleted"]
    assert "permission denied" in outcomes[0].reason
    assert first.finished(store) is None
    assert left(store, second) == []
    store.stubborn = ""
    assert [o.action for o in apply_policy(store, RetentionConfig(max_total_gib=0))] == ["deleted"]
    assert left(store, first) == []


@pytest.mark.parametrize("directory", ["datasets/abc", "hidden_states", "hidden_states/", "hidden_states/a/shards", ""])
def test_only_sets_can_be_deleted(store: Store, directory: str) -> None:
    make_set(store, "a")
    with pytest.raises(StoreError, match="no set of hidden states"):
        retire(store, directory)
    assert len(sets(store)) == 1


def test_all_that_a_set_has_goes_and_no_folder_stays(store: Store) -> None:
    """What another version or a killed writer has left, too; a set that was never finished leaves nothing at all."""
    stage = stage_of("unfinished")
    for name in ("errors/x.json", "old-format/deep/file", LAST_USED_FILE, f"{SHARDS}/x.safetensors"):
        store.write_bytes(stage.path(name), b"{}")
    for name in (".index.parquet.tmp-abc", f"{SHARDS}/.x.safetensors.tmp-abc"):
        Path(store.full_path(stage.path(name))).write_bytes(b"half")
    assert retire(store, stage.directory)
    assert not Path(store.full_path(stage.directory)).exists()


def test_a_remote_set_takes_its_uploads_and_this_machines_cache_with_it(s3_bucket: str, tmp_path: Path) -> None:
    store = Store(f"s3://{s3_bucket}/prefix", cache_dir=tmp_path / "cache")
    stages = [make_set(store, "a"), make_set(store, "b")]
    for stage in stages:
        (store.cache_dir / "hidden_states" / stage.fingerprint).mkdir(parents=True)
    key = f"prefix/{stages[0].path(SHARDS)}/x.safetensors"
    store.fs.call_s3("create_multipart_upload", Bucket=s3_bucket, Key=key)
    assert retire(store, stages[0].directory)
    assert not store.fs.list_multipart_uploads(s3_bucket)
    assert [folder.name for folder in (store.cache_dir / "hidden_states").iterdir()] == [stages[1].fingerprint]


# --- leases -----------------------------------------------------------------------------------------------------------

_HOLD = """
import contextlib, sys
from speculators.hidden_states import retention
from speculators.store import Store
retention.HEARTBEAT_S = 0.05
with contextlib.ExitStack() as leases:
    for url in sys.argv[2:]:
        leases.enter_context(retention.lease(Store(url), sys.argv[1]))
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def other_process(stage: StagePlan, stores: list[Store]) -> Iterator[subprocess.Popen[str]]:
    """A process that holds leases of a set in several stores until it gets a line or is killed."""
    command = [sys.executable, "-c", _HOLD, stage.directory, *(store.url for store in stores)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.usefixtures("fast")
def test_a_set_in_use_stays_and_a_killed_job_does_not_block(
    store: Store, s3_bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stores = [store, Store(f"s3://{s3_bucket}/prefix")]
    stage, _ = [make_set(each, "a") for each in stores]
    with other_process(stage, stores) as process:
        for each in stores:
            for _ in range(5):
                assert not retire(each, stage.directory)
            assert f"{each.url_of(stage.directory)} is not deleted: it is used by {os.uname().nodename}" in caplog.text
            for policy in (RetentionConfig(max_total_gib=0), RetentionConfig(max_age_days=1)):
                assert [o.action for o in apply_policy(each, policy, now=time.time() + 9 * DAY_S)] == ["skipped"]
            policy = RetentionConfig(after_training="delete")
            assert after_training(each, stage.directory, policy).action == "skipped"
            assert missing(each, stage) == each.list(stage.path(DELETIONS)) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    for each in stores:
        assert len(each.list(stage.path(LEASES))) == 1, "left behind"
        assert retire(each, stage.directory, patience_s=0.5)
        assert left(each, stage) == []


@pytest.mark.usefixtures("fast")
def test_a_lease_ends_with_an_error_too_and_several_may_be_held(store: Store) -> None:
    stage = make_set(store, "a")
    with lease(store, stage):
        with pytest.raises(KeyError), lease(store, stage.directory):
            raise KeyError
        assert len(store.list(stage.path(LEASES))) == 1
        assert not retire(store, stage.directory)
    assert store.list(stage.path(LEASES)) == []
    started = time.monotonic()
    assert retire(store, stage.directory)
    assert time.monotonic() - started < 1, "nothing to wait for"


def test_a_lease_of_a_set_that_is_not_there_yet(any_store: Store) -> None:
    stage = stage_of("new")
    with lease(any_store, stage):
        make_set(any_store, "new")
    assert missing(any_store, stage) == []
    assert any_store.exists(stage.path(LAST_USED_FILE))


def test_a_lease_of_a_set_that_is_never_made_leaves_nothing(store: Store) -> None:
    """As in the online mode, which keeps no states."""
    with lease(store, stage_of("online")):
        pass
    assert not Path(store.full_path(stage_of("online").directory)).exists()


class FailingStore(Store):
    """A store that cannot be written for a while."""

    failing = False

    def write_bytes(self, path: str, data: bytes) -> None:
        if self.failing:
            raise StoreError("the endpoint does not answer", is_transient=True)
        super().write_bytes(path, data)


@pytest.mark.usefixtures("fast")
def test_heartbeats_get_over_a_store_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FailingStore(tmp_path / "store")
    stage = make_set(store, "a")
    with lease(store, stage):
        store.failing = True
        wait_until(lambda: "A heartbeat failed" in caplog.text)
        store.failing = False
        assert not retire(Store(tmp_path / "store"), stage.directory)
        store.failing = True
    assert "could not be noted" in caplog.text, "the job has done its work"


@pytest.mark.usefixtures("fast")
def test_a_job_learns_that_its_set_was_taken(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """As after a machine has slept."""
    stage = make_set(store, "a")
    with lease(store, stage):
        store.delete(stage.path(LEASES))
        wait_until(lambda: "took it for dead" in caplog.text)
        assert store.list(stage.path(LEASES)) == []
        assert retire(store, stage.directory)
    assert left(store, stage) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- jobs and deleters at once ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("kind", "rounds"), [("local", 200), ("s3", 6)])
def test_jobs_and_deleters_at_random_moments(
    kind: str, rounds: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A job that holds a lease and has seen the manifest loses no file; both sides get their way again and again."""
    url = str(tmp_path / "store") if kind == "local" else f"s3://{request.getfixturevalue('s3_bucket')}/prefix"
    ended = threading.Event()
    seen: list[bool] = []
    deletions: list[bool] = []

    def use() -> None:
        store, stage, chance = Store(url), stage_of("raced"), random.Random(1)
        try:
            for _ in range(rounds):
                with lease(store, stage):
                    seen.append(stage.finished(store) is not None)
                    if not seen[-1]:
                        make_set(store, "raced")
                    for _ in range(chance.randrange(1, 3)):
                        time.sleep(0.005 * chance.random())
                        assert missing(store, stage) == []
                time.sleep(0.01 * chance.random())
        finally:
            ended.set()

    def delete() -> None:
        store, chance = Store(url), random.Random(2)
        while not ended.is_set():
            deletions.append(retire(store, stage_of("raced").directory))
            time.sleep(0.02 * chance.random())

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(use), pool.submit(delete)]:
            done.result(120)
    assert min(seen.count(True), seen.count(False)) >= rounds // 20
    assert min(deletions.count(True), deletions.count(False)) >= rounds // 20


class SteppedStore(Store):
    """Calls a function before one of its operations in the main thread."""

    def __init__(self, folder: Path, step: int, interrupt: Callable[[], None]) -> None:
        super().__init__(folder)
        self.steps_left, self.interrupt = step, interrupt

    def _step(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.steps_left -= 1
            if self.steps_left == -1:
                self.interrupt()

    def exists(self, path: str) -> bool:
        self._step()
        return super().exists(path)

    def list(self, prefix: str) -> list[str]:
        self._step()
        return super().list(prefix)

    def read_bytes(self, path: str) -> bytes:
        self._step()
        return super().read_bytes(path)

    def write_bytes(self, path: str, data: bytes) -> None:
        self._step()
        super().write_bytes(path, data)

    def delete(self, path: str) -> None:
        self._step()
        super().delete(path)


@pytest.mark.usefixtures("fast")
def test_a_job_that_comes_at_any_step_of_a_deletion(tmp_path: Path) -> None:
    """It either keeps the whole set or waits until all of it is gone."""
    store = Store(tmp_path / "store")
    outcomes = set()
    for step in itertools.count():
        stage = make_set(store, step)
        entered, leave = threading.Event(), threading.Event()
        deleter = SteppedStore(tmp_path / "store", step, lambda: (job.start(), entered.wait(0.1)))  # noqa: B023
        job = JobThread(store, stage, entered, leave)
        is_gone = retire(deleter, stage.directory)
        if deleter.steps_left >= 0:
            break
        leave.set()
        job.join(20)
        assert not job.is_alive()
        assert (job.saw_whole, job.missing) == ((False, None) if is_gone else (True, []))
        outcomes.add(is_gone)
    assert step > 10, "operations of a deletion"
    assert outcomes == {True, False}


class JobThread(threading.Thread):
    """Takes a lease, looks whether the set is whole, and at the end which files are missing then."""

    def __init__(self, store: Store, stage: StagePlan, entered: threading.Event, leave: threading.Event) -> None:
        super().__init__()
        self.store, self.stage, self.entered, self.leave = store, stage, entered, leave
        self.saw_whole: bool | None = None
        self.missing: list[str] | None = None

    def run(self) -> None:
        with lease(self.store, self.stage):
            self.saw_whole = self.stage.finished(self.store) is not None
            self.entered.set()
            self.leave.wait(20)
            if self.saw_whole:
                self.missing = missing(self.store, self.stage)


@pytest.mark.usefixtures("fast")
def test_a_deleter_that_comes_at_any_step_of_a_lease(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    outcomes = set()
    for step in itertools.count():
        stage = make_set(store, step)
        deleted: list[bool] = []
        job = SteppedStore(tmp_path / "store", step, lambda: deleted.append(retire(store, stage.directory)))  # noqa: B023
        with lease(job, stage):
            is_whole = stage.finished(job) is not None
            assert is_whole == (missing(job, stage) == [])
            assert is_whole != (deleted == [True])
        if not deleted:
            break
        assert deleted[0] or missing(store, stage) == []
        outcomes.add(deleted[0])
    assert step > 5
    assert outcomes == {True, False}


@pytest.mark.usefixtures("fast")
def test_two_deleters_do_not_get_in_each_others_way(store: Store) -> None:
    with ThreadPoolExecutor() as pool:
        for number in range(8):
            stage = make_set(store, number)
            attempts = [pool.submit(retire, store, stage.directory) for _ in range(2)]
            assert all(isinstance(attempt.result(30), bool) for attempt in attempts)
            assert retire(store, stage.directory)
            assert left(store, stage) == []


# --- deleters that are killed -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing can be done in this process any more."""


class DyingStore(Store):
    """The store as a process sees it that is killed in one of its deletions, when half of the files are gone."""

    def __init__(self, url: str, deletions: int) -> None:
        super().__init__(url)
        self.left, self.is_dead = deletions, False

    def delete(self, path: str) -> None:
        self.left -= 1
        if self.left < 0 and not self.is_dead:
            for name in super().list(path)[::2]:
                super().delete(name)
            self.is_dead = True
        if self.is_dead:
            raise Killed
        super().delete(path)


def killed_deleters(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[StagePlan]:
    """Sets whose deleters were killed at their first deletion, at their second one, and so on; heartbeats are fast."""
    for number in itertools.count():
        stage = make_set(store, number)
        store.write_json(stage.path("errors/x.json"), {"message": "left by an earlier writer"})
        store.write_json(stage.path(f"{LEASES}/x.json"), {"holder": "a killed job", "counter": 3})
        try:
            retire(DyingStore(store.url, number), stage.directory, patience_s=0.01)
        except Killed:
            assert stage.finished(store) is None or missing(store, stage) == []
            with monkeypatch.context() as patched:
                patched.setattr(retention, "HEARTBEAT_S", 0.02)
                yield stage
        else:
            assert number == 6, "manifest, index, shards, errors, lease, marker"
            return


def test_the_next_deleter_finishes_what_a_killed_one_began(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in killed_deleters(any_store, monkeypatch):
        assert retire(any_store, stage.directory)
        assert left(any_store, stage) == []
        assert retired(any_store, stage) is not None


def test_the_next_job_goes_on_after_a_killed_deleter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in killed_deleters(store, monkeypatch):
        with lease(store, stage):
            assert store.list(stage.path(DELETIONS)) == [], "it was not waited for for ever"
            assert stage.finished(store) is None or missing(store, stage) == []
            make_set(store, stage.determinants["name"])
        assert missing(store, stage) == []


class GatedStore(Store):
    """A store whose deletions of shards wait until they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.begun, self.gate = threading.Event(), threading.Event()

    def delete(self, path: str) -> None:
        if path.endswith(SHARDS):
            self.begun.set()
            assert self.gate.wait(30)
        super().delete(path)


@pytest.mark.usefixtures("fast")
def test_a_job_waits_for_a_deletion_as_long_as_it_takes(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "ABANDONED_BEATS", 20.0)
    caplog.set_level(logging.INFO)
    stage, gated = make_set(store, "a"), GatedStore(store.url)
    entered, leave = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        deletion = pool.submit(retire, gated, stage.directory)
        assert gated.begun.wait(30)
        job = JobThread(store, stage, entered, leave)
        job.start()
        assert not entered.wait(1.5), "longer than an abandoned one is waited for"
        assert f"is being deleted by {os.uname().nodename}" in caplog.text
        gated.gate.set()
        assert deletion.result(30)
        assert entered.wait(30)
        assert len(store.list(stage.path(LEASES))) == 1, "the deleter has left the waiting job's lease"
        leave.set()
        job.join(30)
    assert job.saw_whole is False


@pytest.mark.usefixtures("fast")
def test_a_deleter_that_was_taken_for_dead_stops(store: Store) -> None:
    """As after a machine has slept in the middle of a deletion: the job that went on keeps what it makes."""
    stage, gated = make_set(store, "a"), GatedStore(store.url)
    store.write_bytes(stage.path("errors/x.json"), b"{}")
    with ThreadPoolExecutor() as pool:
        deletion = pool.submit(retire, gated, stage.directory)
        assert gated.begun.wait(30)
        store.delete(stage.path(DELETIONS))
        gated.gate.set()
        assert not deletion.result(30)
    assert store.exists(stage.path("errors/x.json")), "it has stopped at once"


# --- the task and the flow --------------------------------------------------------------------------------------------


def test_the_task_makes_a_table_and_says_what_was_freed(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    artifacts: list[dict[str, Any]] = []
    monkeypatch.setattr(retention_task, "create_table_artifact", lambda **values: artifacts.append(values))
    trained, other = make_set(store, "trained", 15 << 20), make_set(store, "other")
    policy = RetentionConfig(after_training="delete", max_age_days=7)
    outcomes = retention_task.apply_retention.fn(store, policy, trained=trained.directory)
    assert [(o.directory, o.action) for o in outcomes] == [(trained.directory, "deleted"), (other.directory, "kept")]
    assert "1 of 2 sets of hidden states deleted, 0.03 GiB freed." in caplog.text
    [artifact] = artifacts
    assert artifact["key"] == "hidden-states-retention"
    assert artifact["table"][0] == {
        "set": store.url_of(trained.directory),
        "GiB": "0.03",
        "action": "deleted",
        "reason": "a drafter has been trained on it",
    }


def test_the_task_shows_a_set_in_use_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_task, "create_table_artifact", lambda **values: None)
    monkeypatch.setattr(retention, "HEARTBEAT_S", 0.05)
    stage = make_set(store, "trained")
    with lease(store, stage):
        policy = RetentionConfig(after_training="delete", max_total_gib=0)
        outcomes = retention_task.apply_retention.fn(store, policy, trained=stage.directory)
    assert [o.action for o in outcomes] == ["skipped"]


def test_every_parameter_of_the_flow_is_described() -> None:
    properties = retention_flow.parameters.properties
    assert set(properties) == {"store", "max_age_days", "max_total_gib", "keep", "work_dir"}
    assert all(field.get("description") for field in properties.values())
