"""The store: whole files or none, errors that say what to do, the same on a folder and on S3."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from speculators.errors import StoreError
from speculators.store import Store, write_atomic


@pytest.fixture(params=["local", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "store", cache_dir=tmp_path / "cache")
    bucket = request.getfixturevalue("s3_bucket")
    return Store(f"s3://{bucket}/some/prefix", cache_dir=tmp_path / "cache")


def test_round_trip(any_store: Store) -> None:
    any_store.check_writable()
    assert not any_store.exists("a/b.bin")
    any_store.write_bytes("a/b.bin", b"0123456789")
    any_store.write_json("a/c.json", {"x": [1, 2]})
    assert any_store.exists("a/b.bin")
    assert any_store.size("a/b.bin") == 10
    assert any_store.read_bytes("a/b.bin") == b"0123456789"
    assert any_store.read_range("a/b.bin", 2, 5) == b"234"
    assert any_store.read_json("a/c.json") == {"x": [1, 2]}
    assert any_store.list("a") == ["a/b.bin", "a/c.json"]
    local = any_store.local_copy("a")
    assert (local / "b.bin").read_bytes() == b"0123456789"
    any_store.delete("a")
    assert any_store.list("a") == []
    assert any_store.list("never-there") == []


def test_overwrite_is_seen_at_once(any_store: Store) -> None:
    any_store.write_bytes("x", b"old")
    assert any_store.read_bytes("x") == b"old"
    any_store.write_bytes("x", b"new!")
    assert any_store.read_bytes("x") == b"new!"
    assert any_store.local_copy("x").read_bytes() == b"new!"


def test_short_range_is_damage(any_store: Store) -> None:
    any_store.write_bytes("x", b"0123")
    with pytest.raises(StoreError, match="damaged"):
        any_store.read_range("x", 2, 9)


def test_missing_file_names_it(any_store: Store) -> None:
    with pytest.raises(StoreError, match=r"nothing\.bin"):
        any_store.read_bytes("nothing.bin")


def test_paths_cannot_leave_the_store(store: Store) -> None:
    for path in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(StoreError, match="leave the store"):
            store.write_bytes(path, b"")


def test_credentials_in_the_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(StoreError) as error:
        Store("s3://key:secret@bucket/x")
    assert "secret" not in str(error.value)


def test_wrong_credentials_or_bucket(s3_bucket: str) -> None:
    with pytest.raises(StoreError, match="no-such-bucket"):
        Store("s3://no-such-bucket/x").check_writable()


def test_unreachable_endpoint(monkeypatch: pytest.MonkeyPatch, s3_bucket: str) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match="endpoint"):
        Store(f"s3://{s3_bucket}/x").check_writable()


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Cannot write"):
        Store(tmp_path / "file" / "store").check_writable()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Path:
    """A real file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    return folder


def test_full_disk_leaves_nothing_half_written(tiny_disk: Path) -> None:
    try:
        store = Store(tiny_disk / "store")
        store.write_bytes("kept", b"x" * 1000)
        with pytest.raises(StoreError, match="no space left"):
            store.write_bytes("big", b"x" * (2 << 20))
        assert store.list("") == ["kept"]
        assert store.read_bytes("kept") == b"x" * 1000
    finally:
        subprocess.run(["umount", tiny_disk], check=True)


def test_write_atomic_keeps_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "f"
    write_atomic(target, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
