"""Records of a batch folder of an earlier version, which had them in files of their own.

lock                    taken by the process that uses the folder
files/ID.json           the record of a file
batches/ID.json         the record of a batch
batches/ID.results      the results of one that is not over: not taken over, its lines run again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from broker.api.batches.records import BatchRecord, FileRecord
from broker.journal.database import DamagedError, locked

_file: msgspec.json.Decoder[FileRecord] = msgspec.json.Decoder(FileRecord)
_batch: msgspec.json.Decoder[BatchRecord] = msgspec.json.Decoder(BatchRecord)


def is_former(folder: Path) -> bool:
    """Return whether the folder is one of the earlier version."""
    return (folder / "lock").exists()


def lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the earlier version, if the folder is of one. Raises `BlockingIOError`."""
    return locked(folder / "lock") if is_former(folder) else nullcontext()


def records(folder: Path) -> Iterator[FileRecord | BatchRecord]:
    """Yield all records. Raises `OSError`, or `DamagedError` naming one that cannot be read."""
    for path in sorted([*folder.glob("files/*.json"), *folder.glob("batches/*.json")]):
        decoder = _file if path.parent.name == "files" else _batch
        try:
            yield decoder.decode(path.read_bytes())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"{path} is damaged: move it away to go on without it ({error})") from None


def remove(folder: Path) -> None:
    """Remove what was read. Raises `OSError`."""
    for pattern in ("files/*.json", "batches/*", "lock"):
        for path in list(folder.glob(pattern)):
            path.unlink()
