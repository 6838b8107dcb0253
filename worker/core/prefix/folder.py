"""Folder of stored items: one file per item, named by its digest.

Files are in the format of safetensors, which any tool opens, with checksums over every byte. The header
begins with `_MAGIC`, which holds the format version, and the CRC-32 of the rest of the header, which includes
that of the data. So a header can be trusted before the data is read. The checksums protect against damage,
not malice: anyone who can write to the folder can compute any hash.

Writes are atomic: to a temporary file, synced and renamed. Files are trusted only if their checksums match;
damaged ones are removed. Several processes may use the folder: each may remove files, and a missing file is a
miss. Files with other names are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
import psutil

from protocol.common.cache_folder import PREFIX_SUFFIX
from worker.core.prefix.write_budget import DISK_SHARE, WriteBudget
from worker.values import ITEM_BYTES, ArrayBytes

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 2**30
"""A file is read in one piece."""
HEADER_BYTES_MAX = 4 * 2**20
"""Enough for about 400,000 tokens in `Record.about`."""

_MAGIC = b'{"__metadata__":{"format":"roundhouse-prefix-2","checksum":"'
_BETWEEN = b'","data":"'
_CHECKSUM_BYTES = 8
"""A CRC-32 in hex."""
_LENGTH_BYTES = 8
"""The header's length, as the format has it."""


_LEDGER_BYTES = 64
"""Length of the ledger's record, padded: a number's digits never outlive it."""


class _Debt(msgspec.Struct, frozen=True):
    """Record of a ledger: see `WriteBudget`."""

    debt: Annotated[float, msgspec.Meta(ge=0)]
    at: float


_ledger_decoder = msgspec.json.Decoder(_Debt)


class DamagedFileError(ValueError):
    """A file is damaged, or was not written by this cache."""


@dataclass(frozen=True, slots=True)
class Record:
    """A stored item. `digest`: its name, in hex. `about`: its metadata, as JSON types."""

    digest: str
    about: dict[str, Any]
    blobs: dict[str, ArrayBytes]


@dataclass(frozen=True, slots=True)
class FileWriter:
    """A record prepared for writing: its header without the checksums, and its data."""

    digest: str
    header: bytes
    data: tuple[memoryview, ...]
    file_bytes: int

    def write(self, file: BinaryIO) -> None:
        """Write the file. Raises `OSError`."""
        rest = _BETWEEN + _checksum(*self.data) + self.header
        length = len(_MAGIC) + _CHECKSUM_BYTES + len(rest)
        file.write(length.to_bytes(_LENGTH_BYTES, "little") + _MAGIC + _checksum(rest) + rest)
        for piece in self.data:
            file.write(piece)


class _Array(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Entry(_Array, gc=False):
    """Header entry: an array or the metadata, so that one call decodes all entries."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (-1, -1)
    fingerprint: str = ""
    digest: str = ""
    about: str = ""
    data: str = ""


_header_decoder = msgspec.json.Decoder(dict[str, _Entry])
_about_decoder = msgspec.json.Decoder(dict[str, Any])


class FileHeader(NamedTuple):
    """Header of a file, verified against its checksum and the file's size."""

    about: dict[str, Any]
    arrays: Mapping[str, _Array]
    data_checksum: bytes


def prepare(record: Record, fingerprint: str) -> FileWriter:
    """Prepare a record for writing. Raises `ValueError` if a file cannot hold it."""
    # With falling element size behind a padded header every array is aligned, which other readers prefer.
    blobs = sorted(record.blobs.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    data = tuple(_octets(blob) for _, blob in blobs)
    header = _header(record, fingerprint, dict(blobs))
    begun = len(_MAGIC) + 2 * _CHECKSUM_BYTES + len(_BETWEEN)
    header += b" " * (-(begun + len(header)) % 8)
    header_bytes = begun + len(header)
    file_bytes = _LENGTH_BYTES + header_bytes + sum(piece.nbytes for piece in data)
    if header_bytes > HEADER_BYTES_MAX or file_bytes > FILE_BYTES_MAX:
        raise ValueError(f"header of {header_bytes} bytes in a file of {file_bytes} bytes exceeds the limits")
    return FileWriter(record.digest, header, data, file_bytes)


def _header(record: Record, fingerprint: str, blobs: Mapping[str, ArrayBytes]) -> bytes:
    """Return the header after the second checksum, beginning with the quote that ends it."""
    if "__metadata__" in blobs:
        raise ValueError("array name '__metadata__' is reserved")
    try:
        about = msgspec.json.encode(record.about).decode()
        metadata = {"fingerprint": fingerprint, "digest": record.digest, "about": about}
        arrays, end = {}, 0
        for name, blob in blobs.items():
            begin, end = end, end + memoryview(blob.data).nbytes
            arrays[name] = _Array(blob.dtype, blob.shape, (begin, end))
        joined = b'",' + msgspec.json.encode(metadata)[1:]
        return joined + (b"," + msgspec.json.encode(arrays)[1:] if arrays else b"}")
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"metadata cannot be encoded as JSON: {error}") from error


def _octets(blob: ArrayBytes) -> memoryview:
    view = memoryview(blob.data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # empty views cannot always be cast


def _checksum(*pieces: bytes | memoryview) -> bytes:
    state = 0
    for piece in pieces:
        state = zlib.crc32(piece, state)
    return f"{state:08x}".encode()


def read_header(path: Path, fingerprint: str, digest: str) -> tuple[FileHeader, int]:
    """Read a file's header and its size in bytes. Raises `OSError` or `DamagedFileError`."""
    with _opened(path) as file:
        size = _size(file)
        return _read_header(file, size, fingerprint, digest), size


def read_record(path: Path, fingerprint: str, digest: str, buffer: memoryview | None = None) -> Record:
    """Read a whole file, the data into `buffer` if it is given and large enough. Raises `OSError`,
    `MemoryError` or `DamagedFileError`."""
    with _opened(path) as file:
        size = _size(file)
        header = _read_header(file, size, fingerprint, digest)
        data_bytes = max((array.data_offsets[1] for array in header.arrays.values()), default=0)
        if buffer is None or buffer.nbytes < data_bytes:
            buffer = memoryview(bytearray(data_bytes))
        # Read in one piece: each call would wait for the GIL again.
        data = buffer[: file.readinto(buffer[:data_bytes])]  # type: ignore[attr-defined]
    if _checksum(data) != header.data_checksum:
        raise DamagedFileError("the data is damaged")
    try:
        blobs = {
            name: ArrayBytes(
                array.dtype, array.shape, data[slice(*array.data_offsets)], array.data_offsets[0]
            )
            for name, array in header.arrays.items()
        }
    except ValueError as error:
        raise DamagedFileError(f"invalid array: {error}") from error
    return Record(digest, header.about, blobs)


def _opened(path: Path) -> BinaryIO:
    # Something else under this name, such as a pipe, must not block the thread.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


def _size(file: BinaryIO) -> int:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_BYTES_MAX:
        raise DamagedFileError(f"unexpected file: mode {status.st_mode:o}, {status.st_size} bytes")
    return status.st_size


def _read_header(file: BinaryIO, size: int, fingerprint: str, digest: str) -> FileHeader:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(HEADER_BYTES_MAX, size - _LENGTH_BYTES):
        raise DamagedFileError(f"header of {length} bytes in a file of {size} bytes")
    raw = file.read(length)
    rest = len(_MAGIC) + _CHECKSUM_BYTES
    if not raw.startswith(_MAGIC):
        raise DamagedFileError("unknown file format")
    if len(raw) != length or _checksum(memoryview(raw)[rest:]) != raw[len(_MAGIC) : rest]:
        raise DamagedFileError("the header is damaged")
    try:
        arrays = _header_decoder.decode(raw)
        metadata = arrays.pop("__metadata__")
        about = _about_decoder.decode(metadata.about)
    except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError) as error:
        raise DamagedFileError(f"the header cannot be read: {error}") from error
    if (metadata.fingerprint, metadata.digest) != (fingerprint, digest):
        raise DamagedFileError("file belongs to another model or another item")
    _check_offsets(arrays, size - _LENGTH_BYTES - length)
    return FileHeader(about, arrays, metadata.data.encode())


def _check_offsets(arrays: Mapping[str, _Array], data_bytes: int) -> None:
    end = 0
    for array in arrays.values():
        begin, after = array.data_offsets
        if begin != end or after < end:
            raise DamagedFileError("arrays are not contiguous")
        end = after
    if end != data_bytes:
        raise DamagedFileError(f"{data_bytes} bytes of data, expected {end}")


LEFTOVER_AGE_S_MAX = 600.0
"""Age in seconds beyond which a temporary file is considered abandoned."""

DIGEST = re.compile(r"[0-9a-f]{8,128}")
_STORED = re.compile(f"({DIGEST.pattern}){re.escape(PREFIX_SUFFIX)}")
_ASIDE = re.compile(rf"{DIGEST.pattern}\.(\d{{1,9}})-[0-9a-f]{{8}}\.part")


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An existing item: the metadata in its header, and the size of its file."""

    digest: str
    about: dict[str, Any]
    file_bytes: int


class WriteLedger:
    """Record of the write budget, in a file that the workers of all models share, so that it survives them.

    Used by one thread at a time. A damaged record counts as a budget that is used up.
    """

    def __init__(self, path: Path, day_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """`day_bytes`: see `WriteBudget`. `clock`: Unix time."""
        self._path, self._clock, self._full = path, clock, WriteBudget(day_bytes)
        self.left = 0
        """Bytes that might be written at the last look or write."""
        self.look()

    @property
    def full(self) -> WriteBudget:
        """The budget before anything is written."""
        return self._full

    def look(self) -> None:
        """Read the record; while it cannot be read, nothing is left."""
        self.left = 0
        with contextlib.suppress(OSError), self._open() as file:
            self.left = self._read(file).left

    def spend(self, file_bytes: int) -> bool:
        """Record a write before it is made. False: the budget does not have it. Raises `OSError`.

        Waits while another process does the same: if that one is stopped just then, for as long as it is, in
        which requests go on without the disk (`READ_SILENCE_S_MAX`).
        """
        with self._open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            budget = self._read(file)
            spent = budget.spend(file_bytes)
            self.left = (spent or budget).left
            if spent is not None:
                record = msgspec.json.encode(_Debt(spent.debt, spent.at))
                os.pwrite(file.fileno(), record.ljust(_LEDGER_BYTES), 0)
        return spent is not None

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(self._path, "r+b", opener=_open_ledger)

    def _read(self, file: BinaryIO) -> WriteBudget:
        raw, now = os.pread(file.fileno(), _LEDGER_BYTES, 0), self._clock()
        try:
            found = _ledger_decoder.decode(raw) if raw else _Debt(0.0, now)
        except msgspec.MsgspecError:
            found = _Debt(float(self._full.burst), now)
        return replace(self._full, debt=found.debt, at=found.at).refill(now)


def ledger_of(folder: Path, day_bytes: int | None) -> WriteLedger:
    """Return the ledger of a folder of models. `day_bytes`: None: a share of the disk's size."""
    if day_bytes is None:
        day_bytes = 0
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            day_bytes = int(DISK_SHARE * shutil.disk_usage(folder).total)
    return WriteLedger(folder / "writes.json", day_bytes)


class Folder:
    """Folder of the items of the model `fingerprint`. Used by one thread at a time; only `save` raises."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._sizes: dict[str, int] = {}
        self.usage = 0
        """Total bytes of the files found or written here and not removed since."""
        self.name = ""
        """Identity of the machine and the folder, independent of its path; empty: the folder is unusable."""
        try:
            self._make()
            path.chmod(0o700)
            found = path.stat()
            self.name = f"{os.uname().nodename}:{found.st_dev:x}:{found.st_ino:x}"
        except OSError as error:
            log.warning("prefix cache folder cannot be used: %s", error)

    def room(self) -> int | None:
        """Return the free bytes of the disk and those of these files, together; None: unknown."""
        try:
            return self.usage + shutil.disk_usage(self._path).free
        except OSError:
            return None

    def scan(self) -> Iterator[StoredItem]:
        """List the stored items from their headers. Removes damaged, foreign and abandoned files."""
        try:
            with os.scandir(self._path) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return
        for name in names:
            if match := _STORED.fullmatch(name):
                yield from self._look_at(match[1])
            elif match := _ASIDE.fullmatch(name):
                self._clean_up(self._path / name, int(match[1]))

    def _look_at(self, digest: str) -> Iterator[StoredItem]:
        try:
            header, size = read_header(self._file(digest), self._fingerprint, digest)
        except OSError as error:
            log.info("stored prefix %s skipped: %s", digest, error)
        except DamagedFileError as error:
            log.info("stored prefix %s removed: %s", digest, error)
            self.remove(digest)
        else:
            self._count(digest, size)
            yield StoredItem(digest, header.about, size)

    def _clean_up(self, aside: Path, pid: int) -> None:
        with contextlib.suppress(OSError):
            age_s = time.time() - aside.stat().st_mtime
            # In a container an earlier process had our pid; this one has not written anything yet.
            if pid == os.getpid() or age_s > LEFTOVER_AGE_S_MAX or not psutil.pid_exists(pid):
                aside.unlink()

    def read(self, digest: str, buffer: memoryview | None = None) -> Record | None:
        """Read an item, as `read_record`; None: missing, or damaged and therefore removed."""
        try:
            return read_record(self._file(digest), self._fingerprint, digest, buffer)
        except FileNotFoundError:
            self._count(digest, 0)
        except (OSError, DamagedFileError, MemoryError) as error:
            log.warning("stored prefix %s removed, reading failed: %s", digest, error)
            self.remove(digest)
        return None

    def has(self, draft: FileWriter) -> bool:
        """Return whether the item's file exists; another worker of the model may have written it."""
        try:
            _, size = read_header(self._file(draft.digest), self._fingerprint, draft.digest)
        except (OSError, DamagedFileError):
            return False
        if size == draft.file_bytes:
            self._count(draft.digest, size)
        return size == draft.file_bytes

    def save(self, draft: FileWriter) -> None:
        """Write an item. Raises `OSError`; then neither the new file nor the one it replaces exists."""
        aside = self._path / f"{draft.digest}.{os.getpid()}-{secrets.token_hex(4)}.part"
        try:
            self._make()
            with open(aside, "xb", opener=_open_private) as file:
                draft.write(file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._file(draft.digest))
            self._sync()
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            self.remove(draft.digest)
            raise
        self._count(draft.digest, draft.file_bytes)

    def remove(self, digest: str) -> None:
        """Remove an item's file, ignoring errors."""
        with contextlib.suppress(OSError):
            self._file(digest).unlink()
        self._count(digest, 0)

    def _make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _sync(self) -> None:
        # Without this, a power loss may undo the rename.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _file(self, digest: str) -> Path:
        return self._path / f"{digest}{PREFIX_SUFFIX}"

    def _count(self, digest: str, file_bytes: int) -> None:
        self.usage += file_bytes - self._sizes.pop(digest, 0)
        if file_bytes:
            self._sizes[digest] = file_bytes


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _open_ledger(path: str, flags: int) -> int:
    return _open_private(path, flags | os.O_CREAT | os.O_NONBLOCK)
