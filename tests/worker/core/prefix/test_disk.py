"""Stored items on disk: what was written is read back bit for bit, and anything else is a miss."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.system import eventually
from worker.core.prefix.disk import FAILURES_MAX, PAUSE_S, DiskTier
from worker.core.prefix.folder import (
    FILE_BYTES_MAX,
    HEADER_BYTES_MAX,
    LEFTOVER_AGE_S_MAX,
    Record,
    WriteLedger,
    prepare,
    read_header,
    read_record,
)
from worker.values import ITEM_BYTES, ArrayBytes

FINGERPRINT = "f1" * 16
WAIT_S = 20.0
SUFFIX = ".prefix.safetensors"

Open = Callable[..., DiskTier]
Small = tuple[Record, bytes]
deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes" / FINGERPRINT


@pytest.fixture
def open_tier(folder: Path, tmp_path: Path) -> Iterator[Open]:
    tiers: list[DiskTier] = []

    def open_one(path: Path = folder, fingerprint: str = FINGERPRINT, **options: Any) -> DiskTier:
        ledger = options.pop("ledger", None) or WriteLedger(tmp_path / "writes.json", 2**40)
        tiers.append(DiskTier(path, fingerprint, ledger, **options))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close(wait=True)


@pytest.fixture
def tier(open_tier: Open) -> DiskTier:
    return open_tier()


class Answers:
    """The arguments of `done`, called on the tier's thread."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int | None]] = []
        self.read: list[dict[str, Record | None]] = []

    def on_written(self, digest: str, file_bytes: int | None) -> None:
        self.written.append((digest, file_bytes))

    def on_read(self, records: dict[str, Record | None]) -> None:
        self.read.append(records)


def digest_of(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def blob(dtype: str, *shape: int, seed: int = 0) -> ArrayBytes:
    return ArrayBytes(dtype, shape, random.Random(seed).randbytes(math.prod(shape) * ITEM_BYTES[dtype]))


def record(name: object = "a", **blobs: ArrayBytes) -> Record:
    about = {"parent": None, "first": 0, "keys": [1, 2, 2**40], "salt": "naïve"}
    return Record(digest_of(name), about, blobs or {"k": blob("F32", 2, 3), "v": blob("BF16", 1, 5)})


def write(tier: DiskTier, record: Record) -> int | None:
    answers = Answers()
    assert tier.write(record, answers.on_written)
    assert tier.flush(WAIT_S)
    [(digest, file_bytes)] = answers.written
    assert digest == record.digest
    return file_bytes


def read(tier: DiskTier, *digests: str) -> dict[str, Record | None]:
    answers = Answers()
    tier.read(digests, answers.on_read)
    assert tier.flush(WAIT_S)
    [records] = answers.read
    return records


def path_of(folder: Path, record: Record) -> Path:
    return folder / f"{record.digest}{SUFFIX}"


def plain(record: Record | None) -> object:
    """Return a record's contents for comparison, whatever object holds the bytes."""
    assert record is not None
    blobs = {name: (b.dtype, tuple(b.shape), bytes(b.data)) for name, b in record.blobs.items()}
    return record.digest, record.about, blobs


class Gate:
    """Blocks the tier's thread in `done` until it is opened."""

    def __init__(self, tier: DiskTier) -> None:
        self._open, self._reached = threading.Event(), threading.Event()
        tier.read([], self._hold)
        assert self._reached.wait(WAIT_S)

    def _hold(self, _: dict[str, Record | None]) -> None:
        self._reached.set()
        assert self._open.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


# --- round trips ---


def test_a_file_is_safetensors_to_others(tier: DiskTier, folder: Path) -> None:
    shapes = {"U8": (3,), "F32": (2, 3), "BF16": (0, 7), "I64": (1,), "BOOL": ()}
    stored = record(**{dtype: blob(dtype, *shape) for dtype, shape in shapes.items()})
    size = write(tier, stored)
    raw = path_of(folder, stored).read_bytes()
    assert len(raw) == size
    begin = 8 + int.from_bytes(raw[:8], "little")
    assert begin % 8 == 0
    tensors = dict(deserialize(raw))
    assert tensors.keys() == stored.blobs.keys()
    for name, tensor in tensors.items():
        mine = stored.blobs[name]
        assert (tensor["dtype"], tuple(tensor["shape"])) == (mine.dtype, mine.shape)
        assert bytes(tensor["data"]) == bytes(mine.data)
    with safetensors.safe_open(path_of(folder, stored), framework="np") as opened:
        metadata = opened.metadata()
    assert metadata["fingerprint"] == FINGERPRINT
    assert metadata["data"] == f"{zlib.crc32(raw[begin:]):08x}"


_arrays = st.builds(
    lambda dtype, shape, seed: blob(dtype, *shape, seed=seed),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 99),
)
_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda n: n != "__metadata__")
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(_names, _json, max_size=5), st.dictionaries(_names, _arrays, max_size=5))
def test_whatever_is_stored_comes_back(about: dict[str, Any], blobs: dict[str, ArrayBytes]) -> None:
    stored = Record(digest_of("any"), about, blobs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with path.open("wb") as file:
            prepare(stored, FINGERPRINT).write(file)
        assert dict(deserialize(path.read_bytes())).keys() == blobs.keys()
        header, size = read_header(path, FINGERPRINT, stored.digest)
        assert (header.about, size) == (about, path.stat().st_size)
        assert plain(read_record(path, FINGERPRINT, stored.digest)) == plain(stored)


def test_an_item_is_found_again_by_another_tier(tier: DiskTier, open_tier: Open) -> None:
    items = {r.digest: r for r in (record(name) for name in range(20))}
    sizes = {digest: write(tier, item) for digest, item in items.items()}
    other = open_tier()
    found = {f.digest: f for f in other.scan()}
    assert {digest: f.file_bytes for digest, f in found.items()} == sizes
    assert all(found[digest].about == item.about for digest, item in items.items())
    assert other.usage == tier.usage == sum(size or 0 for size in sizes.values())
    assert {d: plain(r) for d, r in read(other, *items).items()} == {d: plain(r) for d, r in items.items()}


def test_an_item_can_be_replaced_and_removed(tier: DiskTier, folder: Path) -> None:
    write(tier, record(x=blob("U8", 1000)))
    smaller = record(x=blob("U8", 10))
    assert tier.usage > 1000
    assert write(tier, smaller) == tier.usage == path_of(folder, smaller).stat().st_size
    assert plain(read(tier, smaller.digest)[smaller.digest]) == plain(smaller)
    tier.remove([smaller.digest, digest_of("never there")])
    assert read(tier, smaller.digest) == {smaller.digest: None}
    assert tier.usage == 0
    assert list(folder.iterdir()) == []


def test_only_the_owner_can_open_what_is_stored(folder: Path, open_tier: Open) -> None:
    folder.mkdir(parents=True, mode=0o755)
    tier, stored = open_tier(), record()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    assert write(tier, stored)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(folder, stored).stat().st_mode) == 0o600


# --- damage ---


@pytest.fixture
def small(tier: DiskTier, folder: Path) -> Small:
    stored = record(k=blob("BF16", 2, 3), v=blob("U8", 5))
    write(tier, stored)
    return stored, path_of(folder, stored).read_bytes()


def assert_missed(
    tier: DiskTier, folder: Path, stored: Record, content: bytes, *, is_scanned: bool | None = None
) -> None:
    """Check that neither a read nor a scan accepts such a file, and that both delete it.

    `is_scanned`: whether a scan, which reads headers only, takes it for whole; None: either.
    """
    path = path_of(folder, stored)
    path.write_bytes(content)
    assert read(tier, stored.digest) == {stored.digest: None}
    assert not path.exists()
    path.write_bytes(content)
    found = [f.digest for f in tier.scan()]
    assert found in ([], [stored.digest])
    assert is_scanned in (None, bool(found))
    if found:
        assert read(tier, stored.digest) == {stored.digest: None}
    assert not path.exists()
    assert tier.usage == 0


def test_a_file_cut_short_anywhere_or_grown_is_a_miss(tier: DiskTier, folder: Path, small: Small) -> None:
    stored, whole = small
    for length in range(len(whole)):
        assert_missed(tier, folder, stored, whole[:length], is_scanned=False)
    assert_missed(tier, folder, stored, whole + b"\0", is_scanned=False)
    assert_missed(tier, folder, stored, whole[:64] + bytes(len(whole) - 64))


def test_a_flip_of_a_bit_of_any_byte_is_a_miss(tier: DiskTier, folder: Path, small: Small) -> None:
    stored, whole = small
    data = 8 + int.from_bytes(whole[:8], "little")
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        assert_missed(tier, folder, stored, bytes(damaged), is_scanned=place >= data)


def test_a_file_under_the_name_of_another_item_is_a_miss(tier: DiskTier, folder: Path, small: Small) -> None:
    stored, _ = small
    other = digest_of("other")
    path_of(folder, stored).rename(folder / f"{other}{SUFFIX}")
    assert read(tier, other, stored.digest) == {other: None, stored.digest: None}
    assert list(folder.iterdir()) == []


def test_files_of_another_model_are_removed(folder: Path, open_tier: Open) -> None:
    foreign, stored = record("foreign"), record("mine")
    write(open_tier(fingerprint="00" * 16), foreign)
    tier = open_tier()
    write(tier, stored)
    assert read(tier, foreign.digest) == {foreign.digest: None}
    write(open_tier(fingerprint="00" * 16), foreign)
    assert [f.digest for f in tier.scan()] == [stored.digest]
    assert list(folder.iterdir()) == [path_of(folder, stored)]


def resealed(whole: bytes, old: bytes, new: bytes) -> bytes:
    """Return the file with another header and a valid checksum."""
    assert whole.count(old) == 1
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length].replace(old, new)
    start = header.index(b'"checksum":"') + 12
    rest = header[start + 8 :]
    header = header[:start] + f"{zlib.crc32(rest):08x}".encode() + rest
    return len(header).to_bytes(8, "little") + header + whole[8 + length :]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"roundhouse-prefix-2", b"roundhouse-prefix-20"),
        (b'"BF16"', b'"BF61"'),
        (b'"shape":[2,3]', b'"shape":[2,4]'),
        (b'"shape":[2,3]', b'"shape":[4611686018427387904,3]'),
        (b'"data_offsets":[0,12]', b'"data_offsets":[0,1099511627776]'),
        (b'"data_offsets":[0,12]', b'"data_offsets":[-12,0]'),
        (b'"data_offsets":[0,12]', b'"data_offsets":[0]'),
        (b'"data_offsets":[12,17]', b'"data_offsets":[0,17]'),
        (b'"dtype":"U8",', b""),
        (b'"about":"{', b'"about":"{{'),
        (b'"digest":"', b'"digest":"0'),
        (b'"fingerprint":"', b'"fingerprint":"\xff'),
        (b'"v":{', b'"w":' + b"[" * 100_000 + b',"v":{'),
    ],
)
def test_forged_header_is_a_miss(tier: DiskTier, folder: Path, small: Small, old: bytes, new: bytes) -> None:
    stored, whole = small
    assert resealed(whole, b'"v":{', b'"v":{') == whole
    assert_missed(tier, folder, stored, resealed(whole, old, new))


@pytest.mark.parametrize("length", [HEADER_BYTES_MAX + 1, 2**64 - 1])
def test_a_huge_claimed_header_is_not_read(tier: DiskTier, folder: Path, length: int) -> None:
    path = path_of(folder, record())
    for size in (100, FILE_BYTES_MAX, 2**40):
        with path.open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(size)  # a hole: none of it is on the disk
        assert tier.scan() == []
        assert not path.exists()


def test_path_that_is_no_regular_file_is_a_quick_miss(tier: DiskTier, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    stored = record("linked")
    write(tier, stored)
    path_of(folder, stored).rename(elsewhere)
    path_of(folder, stored).symlink_to(elsewhere)
    pipe, inhabited = record("pipe"), record("folder")
    os.mkfifo(path_of(folder, pipe))
    (path_of(folder, inhabited) / "within").mkdir(parents=True)
    digests = [stored.digest, pipe.digest, inhabited.digest]
    assert read(tier, *digests) == dict.fromkeys(digests)
    assert not path_of(folder, pipe).exists()
    assert elsewhere.exists()
    os.mkfifo(path_of(folder, pipe))
    assert tier.scan() == []
    assert (path_of(folder, inhabited) / "within").exists()
    assert write(tier, inhabited) is None
    assert tier.usage == 0


def test_files_of_others_are_left_alone(tier: DiskTier, folder: Path) -> None:
    names = ["notes.txt", f"{digest_of('a')}.safetensors", f"{'0' * 7}{SUFFIX}", "x.1-0.part"]
    for name in names:
        (folder / name).write_bytes(b"theirs")
    assert tier.scan() == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_leftovers_are_removed_when_nobody_can_be_writing_them(tier: DiskTier, folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(WAIT_S)
    dead, own, live, old = (
        folder / f"{digest_of('a')}.{pid}-{number:08}.part"
        for number, pid in enumerate((ended.pid, os.getpid(), os.getppid(), os.getppid()))
    )
    for path in (dead, own, live, old):
        path.write_bytes(b"unfinished")
    long_ago = old.stat().st_mtime - LEFTOVER_AGE_S_MAX - 60
    os.utime(old, (long_ago, long_ago))
    assert tier.scan() == []
    assert list(folder.iterdir()) == [live]


def test_two_tiers_in_one_folder_do_each_other_no_harm(tier: DiskTier, open_tier: Open) -> None:
    other = open_tier()
    items = [record(name, x=blob("U32", 1000, seed=name)) for name in range(10)]
    answers = Answers()
    for item in items:
        assert tier.write(item, answers.on_written)
        assert other.write(item, answers.on_written)
    assert tier.flush(WAIT_S)
    assert other.flush(WAIT_S)
    assert len(answers.written) == 20
    assert None not in dict(answers.written).values()
    assert plain(read(tier, items[0].digest)[items[0].digest]) == plain(items[0])
    other.remove([items[0].digest])
    assert other.flush(WAIT_S)
    assert read(tier, items[0].digest) == {items[0].digest: None}
    tier.remove([items[0].digest])
    assert plain(read(tier, items[1].digest)[items[1].digest]) == plain(items[1])
    assert tier.usage == other.usage


# --- failed writes ---

_WITH_LITTLE_ROOM = """
import resource, sys
from pathlib import Path
from worker.core.prefix.disk import DiskTier
from worker.core.prefix.folder import ArrayBytes, Record, WriteLedger

resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
tier = DiskTier(Path(sys.argv[1]), "f1", WriteLedger(Path(sys.argv[1]).parent / "writes.json", 2**40))
written = {}
for name, size in (("aa" * 8, 100), ("bb" * 8, 200_000), ("cc" * 8, 60_000), ("aa" * 8, 200_000)):
    assert tier.write(Record(name, {}, {"x": ArrayBytes("U8", (size,), bytes(size))}), written.__setitem__)
    assert tier.flush(20)
    print(written.get(name) is not None, [path.name[:2] for path in sorted(Path(sys.argv[1]).iterdir())])
tier.read(["aa" * 8, "cc" * 8], lambda found: print([name[:2] for name, r in found.items() if r]))
tier.close(wait=True)
"""


def test_a_file_that_does_not_fit_leaves_nothing_behind(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _WITH_LITTLE_ROOM, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.splitlines() == [
        "True ['aa']",
        "False ['aa']",
        "True ['aa', 'cc']",
        "False ['cc']",
        "['cc']",
    ]
    assert ended.stderr.count("prefixes cannot be stored") == 2


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_failures_pause_writing(tmp_path: Path, open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="worker")
    blocked = tmp_path / "taken"
    blocked.write_text("a file where the folder should be")
    clock = Clock()
    tier = open_tier(blocked, clock=clock)
    assert tier.scan() == []
    assert "folder cannot be used" in caplog.text
    for _ in range(FAILURES_MAX):
        assert write(tier, record()) is None
    assert caplog.text.count("cannot be stored") == 1
    answers = Answers()
    assert not tier.write(record(), answers.on_written)
    assert read(tier, record().digest) == {record().digest: None}
    clock.now += PAUSE_S
    assert write(tier, record()) is None
    assert not tier.write(record(), answers.on_written)
    clock.now += PAUSE_S
    blocked.unlink()
    assert write(tier, record())
    assert "can be stored again" in caplog.text
    assert plain(read(tier, record().digest)[record().digest]) == plain(record())


def deny(*_: object) -> int:
    raise PermissionError(errno.EACCES, "denied")


@pytest.mark.parametrize(
    "step",
    [
        "worker.core.prefix.folder._open_private",
        "os.fsync",
        "pathlib.Path.replace",
        "worker.core.prefix.folder.Folder._sync",
    ],
)
def test_a_folder_that_cannot_be_written_is_read(
    tier: DiskTier, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    # Not by permissions, which root bypasses.
    stored = record()
    write(tier, stored)
    monkeypatch.setattr(step, deny)
    assert write(tier, record("b")) is None
    assert plain(read(tier, stored.digest)[stored.digest]) == plain(stored)
    assert [f.digest for f in tier.scan()] == [stored.digest]
    assert list(folder.iterdir()) == [path_of(folder, stored)]


def test_a_file_is_named_between_syncs(tier: DiskTier, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, sync = record(), os.fsync
    seen: list[tuple[bool, int, bool]] = []

    def watch(descriptor: int) -> None:
        status = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(status.st_mode)
        seen.append((is_folder, 0 if is_folder else status.st_size, path_of(folder, stored).exists()))
        sync(descriptor)

    monkeypatch.setattr("os.fsync", watch)
    file_bytes = write(tier, stored)
    assert seen == [(False, file_bytes, False), (True, 0, True)]


# --- the queue ---


def test_a_full_queue_takes_nothing_more(open_tier: Open) -> None:
    item = record(x=blob("U8", 2000))
    file_bytes = prepare(item, FINGERPRINT).file_bytes
    tier, answers = open_tier(queue_bytes_max=2 * file_bytes), Answers()
    gate = Gate(tier)
    taken = [tier.write(record(name, x=blob("U8", 2000)), answers.on_written) for name in "abc"]
    assert taken == [True, True, False]
    gate.open()
    assert tier.flush(WAIT_S)
    assert answers.written == [(digest_of(name), file_bytes) for name in "ab"]
    assert write(tier, record("c", x=blob("U8", 2000)))
    assert not tier.write(record("d", x=blob("U8", 6000)), answers.on_written)


def test_reads_and_removals_overtake_writes(tier: DiskTier) -> None:
    there = record("there")
    write(tier, there)
    order: list[str] = []
    gate = Gate(tier)
    for name in "ab":
        assert tier.write(record(name), lambda digest, _: order.append(f"wrote {digest}"))
    tier.read([there.digest], lambda found: order.append(f"read {found[there.digest] is not None}"))
    tier.remove([there.digest])
    tier.read([there.digest], lambda found: order.append(f"read {found[there.digest] is not None}"))
    gate.open()
    assert tier.flush(WAIT_S)
    assert order == ["read True", "read False", *(f"wrote {digest_of(name)}" for name in "ab")]


def test_a_removal_drops_what_was_queued_before_it_and_not_what_comes_after(tier: DiskTier) -> None:
    answers = Answers()
    gate = Gate(tier)
    before, other, after = record("a"), record("b"), record("a", x=blob("U8", 9))
    assert tier.write(before, answers.on_written)
    assert tier.write(other, answers.on_written)
    tier.remove([before.digest])
    assert tier.write(after, answers.on_written)
    gate.open()
    assert tier.flush(WAIT_S)
    assert [(digest, size is not None) for digest, size in answers.written] == [
        (before.digest, False),
        (other.digest, True),
        (after.digest, True),
    ]
    assert plain(read(tier, after.digest)[after.digest]) == plain(after)


def test_closing_without_waiting_drops_the_queue(tier: DiskTier, folder: Path, open_tier: Open) -> None:
    gone, kept = record("gone"), record("kept")
    write(tier, gone)
    write(tier, kept)
    answers = Answers()
    gate = Gate(tier)
    assert tier.write(record("late"), answers.on_written)
    tier.read([kept.digest], answers.on_read)
    tier.remove([gone.digest])
    tier.close(wait=False)
    assert not tier.write(record("too late"), answers.on_written)
    tier.read([kept.digest], answers.on_read)
    tier.remove([kept.digest])
    gate.open()
    eventually(lambda: answers.written, within_s=WAIT_S, what="the write is given up")
    assert answers.written == [(digest_of("late"), None)]
    assert answers.read == [{kept.digest: None}] * 2
    assert [path.name for path in folder.iterdir()] == [path_of(folder, kept).name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_leaves_nobody_waiting(tier: DiskTier) -> None:
    def fail(_: dict[str, Record | None]) -> None:
        raise RuntimeError("a mistake of the caller's")

    answers = Answers()
    gate = Gate(tier)
    tier.read([], fail)
    tier.read([digest_of("a")], answers.on_read)
    assert tier.write(record(), answers.on_written)
    gate.open()
    eventually(lambda: answers.written, within_s=WAIT_S, what="the write is given up")
    tier.read([digest_of("a")], answers.on_read)
    assert answers.read == [{digest_of("a"): None}] * 2
    assert not tier.write(record(), answers.on_written)


# --- space ---------------------------------------------------------------------------------------------


def test_an_idle_tier_looks_at_the_space_and_says_so(open_tier: Open) -> None:
    looked = threading.Event()
    tier = open_tier(on_space=looked.set, space_every_s=0.01)
    assert looked.wait(WAIT_S)
    assert tier.room is not None
    assert tier.room > 0


def test_own_files_change_nothing_about_the_room(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = [1000]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=disk[0]))
    tier, answers = open_tier(), Answers()
    assert tier.room == 1000
    assert tier.write(Record("0123abcd", {}, {}), answers.on_written)
    assert tier.flush(WAIT_S)
    assert tier.room == 1000 + tier.usage > 1000
