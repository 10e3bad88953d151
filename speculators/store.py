"""The store: one fsspec URL that every stage reads from and writes to.

Local folders and object stores behave alike here: a file either is not there or is whole. Local writes go to a
temporary file beside the target, are synced and renamed; an object store's PUT is atomic by itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from speculators.errors import StoreError

TEMPORARY_MARK = ".tmp-"
_PART_BYTES = 16 << 20
# What S3 answers, as s3fs translates it, and what a connection that breaks raises: worth another try.
_TRANSIENT_ERRNOS = {errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.ETIMEDOUT}
_TRANSIENT_BOTOCORE = {
    "ConnectionClosedError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "ReadTimeoutError",
}
_TRANSIENT_ERRORS = (ConnectionError, TimeoutError, fsspec.exceptions.FSTimeoutError)


def write_atomic(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a local file, one piece after another, so that it is either whole or absent, also after a crash or power
    loss.

    Raises:
        OSError: As the operating system reports it (full disk, no permission). The temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:12]}"
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Store:
    """Files below one fsspec URL, addressed by relative paths with forward slashes.

    Args:
        url: A folder or an fsspec URL such as ``s3://bucket/prefix``. S3 credentials and endpoint come from the
            environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) only.
        cache_dir: Local folder where :meth:`local_copy` keeps what it fetched from a remote store.

    Raises:
        StoreError: The URL names a protocol that fsspec does not know, or carries a password.
    """

    def __init__(self, url: str | Path, cache_dir: str | Path = "work/cache") -> None:
        self.url = str(url).rstrip("/")
        if "@" in self.url.partition("://")[2].split("/")[0]:
            raise StoreError(
                "The store's URL carries credentials. Put them into the environment (AWS_ACCESS_KEY_ID, ...)."
            )
        options = {"use_listings_cache": False} if self.url.startswith("s3://") else {}
        try:
            self.fs, self.root = url_to_fs(self.url, **options)
        except (ValueError, ImportError) as error:
            raise StoreError(f"Store {self.url!r} cannot be opened: {error}") from error
        self.cache_dir = Path(cache_dir)

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder of this machine."""
        return isinstance(self.fs, LocalFileSystem)

    def full_path(self, path: str) -> str:
        """The path as the fsspec filesystem wants it. Refuses to leave the store.

        Raises:
            StoreError: The path is absolute or has ``..`` in it.
        """
        if path.startswith("/") or ".." in path.split("/"):
            raise StoreError(f"Path {path!r} would leave the store {self.url}.")
        return f"{self.root}/{path}" if path else self.root

    def url_of(self, path: str) -> str:
        """The full URL of a path, for messages and manifests."""
        return f"{self.url}/{path}"

    def exists(self, path: str) -> bool:
        """Whether a file is there (a half-written one never is)."""
        with _explained(self, "read", path):
            return bool(self.fs.exists(self.full_path(path)))

    def size(self, path: str) -> int:
        """Size of a file in bytes."""
        with _explained(self, "read", path):
            return int(self.fs.size(self.full_path(path)))

    def read_bytes(self, path: str) -> bytes:
        """A whole file."""
        with _explained(self, "read", path):
            return bytes(self.fs.cat_file(self.full_path(path)))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes ``start`` (included) to ``end`` (excluded) of a file.

        Raises:
            StoreError: Fewer bytes came back than asked for: the file is shorter than its index says.
        """
        with _explained(self, "read", path):
            data = bytes(self.fs.cat_file(self.full_path(path), start=start, end=end))
        if len(data) != end - start:
            raise StoreError(f"{self.url_of(path)} is damaged: bytes {start} to {end} asked for, {len(data)} came.")
        return data

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file atomically: readers see the old one, or none, until the new one is whole.

        Raises:
            StoreError: The store cannot be written (full, no permission, unreachable); says which and what to do.
        """
        full = self.full_path(path)
        with _explained(self, "write", path):
            if self.is_local:
                write_atomic(Path(full), data)
            else:
                self.fs.pipe_file(full, data)

    def write_pieces(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a large file from pieces that are not joined in memory; atomic as :meth:`write_bytes`.

        An object store gets it in parts, which count only once all have arrived.

        Raises:
            StoreError: As in :meth:`write_bytes`.
        """
        full = self.full_path(path)
        with _explained(self, "write", path):
            if self.is_local:
                write_atomic(Path(full), *pieces)
                return
            file = self.fs.open(full, "wb", block_size=_PART_BYTES)
            try:
                for piece in pieces:
                    file.write(piece)
                file.close()
            except BaseException:
                file.closed = True  # or it would be closed later, and what has arrived taken for the whole
                file.discard()
                raise

    def read_json(self, path: str) -> Any:
        """A JSON file's content.

        Raises:
            StoreError: The file is missing or not JSON.
        """
        data = self.read_bytes(path)
        try:
            return json.loads(data)
        except ValueError as error:
            raise StoreError(
                f"{self.url_of(path)} is not valid JSON ({error}). Delete it to have it made anew."
            ) from error

    def write_json(self, path: str, value: Any) -> None:
        """Write a value as indented JSON, atomically."""
        self.write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def list(self, prefix: str) -> list[str]:
        """Paths (relative to the store) of all files below a prefix, sorted; temporary files left out."""
        with _explained(self, "list", prefix):
            try:
                found = self.fs.find(self.full_path(prefix))
            except FileNotFoundError:
                return []
        skip = len(self.root) + 1
        return sorted(p[skip:] for p in found if TEMPORARY_MARK not in p.rsplit("/", 1)[-1])

    def delete(self, path: str) -> None:
        """Remove a file or everything below a prefix; nothing happens where there is nothing."""
        with _explained(self, "delete", path):
            full = self.full_path(path)
            if self.fs.exists(full):
                self.fs.rm(full, recursive=True)

    def abort_uploads(self, prefix: str) -> None:
        """Give up uploads in parts that were begun below a prefix and never finished: unseen, they take space.

        A local store has none, and an object store without a list of them is left alone.
        """
        if not hasattr(self.fs, "list_multipart_uploads"):
            return
        bucket, _, folder = self.full_path(prefix).partition("/")
        with contextlib.suppress(OSError, NotImplementedError):
            for upload in self.fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{folder}/"):
                    self.fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])

    def upload_folder(self, local: Path, path: str) -> None:
        """Copy every file of a local folder to ``path``, each atomically, ``config.json`` and manifests last."""
        files = sorted(f for f in local.rglob("*") if f.is_file())
        for file in sorted(files, key=lambda f: f.suffix == ".json"):
            self.write_bytes(f"{path}/{file.relative_to(local).as_posix()}", file.read_bytes())

    def local_copy(self, path: str) -> Path:
        """A local path for a file or folder of the store: itself for a local store, else a fetched copy.

        Fetched copies lie in the cache folder and are fetched again only when the size differs.

        Raises:
            StoreError: There is nothing at ``path``.
        """
        if self.is_local:
            local = Path(self.full_path(path))
            if not local.exists():
                raise StoreError(f"{self.url_of(path)} does not exist.")
            return local.resolve()
        key = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        target = (self.cache_dir / "store" / key / path).resolve()
        files = self.list(path)
        if not files:
            raise StoreError(f"{self.url_of(path)} does not exist.")
        for name in files:
            local = target if name == path else target / name[len(path) + 1 :]
            if not local.exists() or local.stat().st_size != self.size(name):
                write_atomic(local, self.read_bytes(name))
        return target

    def check_writable(self) -> None:
        """Write and remove a small file, so that a wrong store fails before hours of work, not after.

        Raises:
            StoreError: Says what went wrong and what to check.
        """
        probe = f".write-test{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}"
        self.write_bytes(probe, b"ok")
        self.delete(probe)

    def free_bytes(self) -> int | None:
        """Free space in bytes for a local store; None where it has no limit to ask for."""
        if not self.is_local:
            return None
        folder = Path(self.root)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free


class _explained:
    """Turn what a filesystem raises into a StoreError that says what to do."""

    def __init__(self, store: Store, verb: str, path: str) -> None:
        self.store, self.verb, self.path = store, verb, path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, StoreError) or not isinstance(error, Exception):
            return
        where = f"Cannot {self.verb} {self.store.url_of(self.path)}"
        if isinstance(error, FileNotFoundError):
            raise StoreError(f"{where}: it does not exist ({error}).") from error
        if isinstance(error, PermissionError):
            code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
            if code in ("ExpiredToken", "RequestTimeTooSkewed"):
                what = "the credentials have expired" if code == "ExpiredToken" else "this machine's clock is off"
                raise StoreError(
                    f"{where}: {what} ({error}). Put that right and run again; what is finished is kept."
                ) from error
            raise StoreError(
                f"{where}: permission denied ({error}). Check the folder's owner, or the credentials in the environment"
                " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and the bucket's policy."
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"{where}: no space left. Free some space, or set `store` to a place with more; what is finished is"
                " kept and the next run goes on from there."
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENOTDIR):
            raise StoreError(
                f"{where}: {os.strerror(error.errno)}. Set `store` to a folder that can be written."
            ) from error
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            raise StoreError(f"{where}: no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.") from error
        if type(error).__name__ in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionError"):
            raise StoreError(
                f"{where}: the endpoint does not answer ({error}). Check AWS_ENDPOINT_URL.", is_transient=True
            ) from error
        if isinstance(error, (OSError, ValueError, fsspec.exceptions.FSTimeoutError)) or type(
            error
        ).__module__.partition(".")[0] in ("botocore", "aiobotocore", "aiohttp"):
            raise StoreError(f"{where}: {error}", is_transient=_is_transient(error)) from error


def _is_transient(error: Exception) -> bool:
    return (
        isinstance(error, _TRANSIENT_ERRORS)
        or getattr(error, "errno", None) in _TRANSIENT_ERRNOS
        or type(error).__module__.partition(".")[0] in ("aiohttp", "urllib3")
        or (type(error).__name__ in _TRANSIENT_BOTOCORE)
    )
