"""The journal's file: a model of what must be in it, and damage of every kind."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import tempfile
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.journal import file as module
from broker.journal.database import DamagedError, remove
from broker.journal.file import (
    AGE_S_MAX,
    Append,
    Delete,
    JournalFile,
    Operation,
    Put,
    Quota,
    Replace,
    StoredEntry,
)
from broker.journal.journal import Errors

BYTES_MAX = 2**20
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""A folder in memory, where syncing takes no time."""
NAMES = [("answer", "a"), ("answer", "b"), ("response", "a")]
Content = dict[tuple[str, str], tuple[bytes, list[bytes], bool, frozenset[bytes]]]
"""Head, items, whether it has ended, and blobs of each entry."""

tails = st.one_of(st.just(b""), st.binary(max_size=60), st.integers(1, 9000).map(bytes))
"""What is behind the end of a log that was cut: nothing, noise, or zeros."""
heads = st.binary(max_size=40)
blobs = st.lists(st.sampled_from([b"x" * 10, b"y" * 5000, b""]), max_size=3)
operations: st.SearchStrategy[Operation] = st.one_of(
    st.builds(
        Put,
        name=st.sampled_from(NAMES),
        head=heads,
        blobs=blobs.map(lambda some: {sha256(each).digest(): each for each in some}),
        ended=st.booleans(),
    ),
    st.builds(Append, name=st.sampled_from(NAMES), item=st.binary(max_size=60)),
    st.builds(Replace, name=st.sampled_from(NAMES), head=st.none() | heads, ended=st.booleans()),
    st.builds(Delete, name=st.sampled_from(NAMES)),
)


def applied(content: Content, group: list[Operation]) -> Content:
    """Return what the file must hold after a group."""
    after = dict(content)
    for operation in group:
        known = after.get(operation.name)
        match operation:
            case Put(name, head, some, ended):
                after[name] = (head, [], ended, frozenset(some.values()))
            case Append(name, item) if known is not None:
                after[name] = (known[0], [*known[1], item], *known[2:])
            case Replace(name, head, ended) if known is not None:
                after[name] = (known[0] if head is None else head, known[1], ended, known[3])
            case Delete(name):
                after.pop(name, None)
    return after


def content_of(file: JournalFile) -> Content:
    """Read everything; each blob that is used must be there."""
    found: Content = {}
    for kind in ("answer", "response"):
        for entry in file.entries(kind):
            rows = file._base.run(
                "SELECT digest FROM uses JOIN entries ON entry = number WHERE kind = ? AND id = ?", entry.name
            )
            data = [file.blob(bytes(digest)) for (digest,) in rows.fetchall()]
            assert None not in data
            found[entry.name] = (
                entry.head,
                entry.items,
                entry.ended,
                frozenset(b for b in data if b is not None),
            )
    return found


class FileMachine(RuleBasedStateMachine):
    """Groups of operations, restarts, and damage to the last bytes of either file."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.path = self.folder / "journal" / "journal.sqlite"
        self.file = JournalFile(self.path, BYTES_MAX, 0.0)
        self.states: list[Content] = [{}]
        """What the file held after each group, the latest last."""

    def teardown(self) -> None:
        self.file.close()
        shutil.rmtree(self.folder)

    @rule(group=st.lists(operations, min_size=1, max_size=6))
    def write(self, group: list[Operation]) -> None:
        self.file.apply(group, 0.0)
        self.states.append(applied(self.states[-1], group))

    @rule()
    def restart(self) -> None:
        self.file.close()
        self.file = JournalFile(self.path, BYTES_MAX, 0.0)
        self.states = self.states[-1:]

    @rule()
    def die(self) -> None:
        """A process that was killed leaves its files as they are, the log with the latest groups beside."""
        copies = [(part, part.read_bytes()) for part in self.path.parent.iterdir()]
        self.file.close()
        for part, data in copies:
            part.write_bytes(data)
        self.file = JournalFile(self.path, BYTES_MAX, 0.0)
        self.states = self.states[-1:]

    @precondition(lambda self: len(self.states) > 1)
    @rule(cut=st.integers(1, 9000), tail=tails)
    def cut_log(self, cut: int, tail: bytes) -> None:
        """A disk that froze has an earlier state, whatever is behind the end of the log."""
        self._damage("-wal", cut, tail)
        self.file = JournalFile(self.path, BYTES_MAX, 0.0)
        found = content_of(self.file)
        assert found in self.states
        self.states = [found]

    @precondition(lambda self: len(self.states) > 1)
    @rule(cut=st.integers(1, 9000))
    def cut_database(self, cut: int) -> None:
        """No disk that froze has a shorter database; it is noticed, or nothing is missing."""
        self._damage("", cut, b"")
        try:
            self.file = JournalFile(self.path, BYTES_MAX, 0.0)
            found = content_of(self.file)
        except Errors:
            self.file.close()
            remove(self.path)
            self.file = JournalFile(self.path, BYTES_MAX, 0.0)
            found = {}
        assert found in (*self.states, {})
        self.states = [found]

    def _damage(self, of: str, cut: int, tail: bytes) -> None:
        copies = [(part, part.read_bytes()) for part in self.path.parent.iterdir()]
        self.file.close()
        for part, data in copies:
            part.write_bytes(data[:-cut] + tail if part.name == self.path.name + of else data)

    @invariant()
    def holds_what_was_written(self) -> None:
        assert content_of(self.file) == self.states[-1]


TestFile = FileMachine.TestCase
TestFile.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "journal.sqlite"


def test_only_its_owner_can_read_it(path: Path) -> None:
    file = JournalFile(path, BYTES_MAX, 0.0)
    file.apply([Put(NAMES[0], b"x")], 0.0)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(part.stat().st_mode) for part in path.parent.iterdir()} == {0o600}
    file.close()
    path.parent.chmod(0o755)
    with pytest.raises(PermissionError):
        JournalFile(path, BYTES_MAX, 0.0)


def test_what_was_deleted_is_not_left_in_the_file(path: Path) -> None:
    file = JournalFile(path, BYTES_MAX, 0.0)
    names = [("answer", str(number)) for number in range(30)]
    secret = b"a secret " * 3000
    file.apply([Put(name, secret, {sha256(secret).digest(): secret}) for name in names], 0.0)
    file.apply([Append(names[0], b"a secret item")], 0.0)
    file.apply([Delete(name) for name in names], 0.0)
    file.tidy()
    assert sum(part.stat().st_size for part in path.parent.iterdir()) < 100_000, "space is given back"
    file.close()
    assert b"secret" not in path.read_bytes()


def test_flipped_bits_are_noticed(path: Path) -> None:
    file = JournalFile(path, BYTES_MAX, 0.0)
    file.apply([Put(NAMES[0], b"H" * 50, {sha256(b"B" * 50).digest(): b"B" * 50})], 0.0)
    file.apply([Append(NAMES[0], b"I" * 50)], 0.0)
    file.close()
    whole = path.read_bytes()
    for letter in (b"H", b"I", b"B"):
        at = whole.index(letter * 50)
        path.write_bytes(whole[:at] + b"Z" + whole[at + 1 :])
        file = JournalFile(path, BYTES_MAX, 0.0)
        with pytest.raises(DamagedError):
            content_of(file)
        file.close()


def test_a_damaged_index_is_noticed_where_it_would_hide_what_was_written(path: Path) -> None:
    digest = sha256(b"B" * 50).digest()
    file = JournalFile(path, BYTES_MAX, 0.0)
    file.apply([Put(NAMES[0], b"head", {digest: b"B" * 50})], 0.0)
    file.close()
    whole = path.read_bytes()
    places = [place for place in range(len(whole)) if whole.startswith(digest, place)]
    assert len(places) == 4, "two tables and their indices"
    for place in places:
        path.write_bytes(whole[:place] + b"Z" + whole[place + 1 :])
        with pytest.raises(Errors):
            JournalFile(path, BYTES_MAX, 0.0)


def test_the_oldest_ended_entries_give_way_and_then_new_ones_are_refused(path: Path) -> None:
    file = JournalFile(path, 300_000, 0.0)
    file.apply([Put(("answer", "open"), b"x" * 70_000)], 1.0)
    for number in range(4):
        file.apply([Put(("answer", str(number)), b"x" * 70_000, ended=True)], 2.0 + number)
    assert {entry.name[1] for entry in file.entries("answer")} == {"open", "2", "3"}
    file.apply([Put(("answer", "large"), b"x" * 210_000)], 9.0)
    assert {entry.name[1] for entry in file.entries("answer")} == {"open"}
    assert file.refused == 1
    file.apply([Append(("answer", "large"), b"without effect")], 9.0)
    file.apply([Put(("answer", "new"), b"new")], AGE_S_MAX / 2)
    file.close()
    file = JournalFile(path, 300_000, AGE_S_MAX * 1.1)  # when it is opened, old ones are removed
    assert {entry.name[1] for entry in file.entries("answer")} == {"new"}
    file.close()


def test_entries_that_are_too_old_are_deleted_with_the_next_group_so_many_at_a_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPIRED_MAX", 2)
    file = JournalFile(path, BYTES_MAX, 0.0)
    shared = {sha256(b"shared").digest(): b"shared"}
    file.apply([Put(("answer", str(number)), b"", shared) for number in range(3)], 1.0)
    file.apply([Put(("response", "new"), b"", shared)], AGE_S_MAX)
    file.apply([], AGE_S_MAX + 1.0)
    assert (file.count, file.overdue) == (4, False)
    file.apply([Replace(("answer", "2"), b"changed")], AGE_S_MAX + 2.0)
    assert (file.count, file.overdue) == (2, True)
    assert {entry.name[1] for entry in file.entries("answer")} == {"2"}
    file.apply([], 2 * AGE_S_MAX + 3.0)
    assert (file.count, file.overdue) == (0, True)
    file.apply([], 2 * AGE_S_MAX + 3.0)
    assert not file.overdue
    assert file.blob(sha256(b"shared").digest()) is None
    file.close()


def test_the_served_models_are_known_however_long_ago_their_workers_came(path: Path) -> None:
    served = Put(("served", "model"), b"ready")
    file = JournalFile(path, BYTES_MAX, 0.0)
    file.apply([served, Put(("answer", "a"), b"")], 1.0)
    file.apply([], AGE_S_MAX * 2)
    assert [entry.name for kind in ("served", "answer") for entry in file.entries(kind)] == [served.name]
    file.close()
    file = JournalFile(path, BYTES_MAX, AGE_S_MAX * 2)
    assert file.count == 1
    file.close()


# --- quotas and owners -----------------------------------------------------------------------------------

RESPONSE = "response"


def response(owner: str, id: object, *blobs: bytes) -> Put:
    named = {sha256(blob).digest(): blob for blob in blobs}
    return Put((RESPONSE, f"{owner}:{id}"), b"head", named, ended=True, owner=owner)


def names(file: JournalFile) -> list[str]:
    return [entry.name[1] for entry in file.entries(RESPONSE)]


def in_memory(count_max: int, bytes_max: int) -> JournalFile:
    return JournalFile(None, BYTES_MAX, 0.0, {RESPONSE: Quota(count_max, bytes_max)})


@pytest.mark.parametrize(("count_max", "bytes_max"), [(6, 2**20), (1000, 8000)])
def test_eviction_is_fair_between_owners(count_max: int, bytes_max: int) -> None:
    file = in_memory(count_max, bytes_max)
    file.apply([response("bob", "old", b"x" * 300)], 0.0)
    for number in range(40):
        file.apply([response("ann", number, b"%300d" % number)], number)
    assert {"bob:old", "ann:39"} <= set(names(file))
    for number in range(40):
        file.apply([response("bob", number, b"%300d" % -number)], 50.0 + number)
    owners = [name.partition(":")[0] for name in names(file)]
    assert abs(owners.count("ann") - owners.count("bob")) <= 1
    assert {"ann:39", "bob:39"} <= set(names(file))
    assert "bob:old" not in names(file)
    file.apply([response("ann", "large", b"x" * 2**20)], 99.0)
    others = sum(name.startswith("bob") for name in names(file))
    assert others == owners.count("bob"), "one that is too large evicts none of another owner"
    file.close()


acts = st.tuples(st.sampled_from(["new", "go on", "extend", "delete"]), st.integers(0, 30))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1500, 9000), st.lists(acts, max_size=30))
def test_a_quota_holds_the_oldest_go_first_and_what_others_share_with_them_stays(
    count_max: int, bytes_max: int, script: list[tuple[str, int]]
) -> None:
    file = in_memory(count_max, bytes_max)
    there: dict[str, list[bytes]] = {}
    for number, (act, which) in enumerate(script):
        name, blob = list(there)[which % len(there)] if there else "", b"%d" % number * 20 * which
        match act if there else "new":
            case "delete":
                del there[name]
                file.apply([Delete((RESPONSE, name))], number)
            case "extend":
                there[name] = [*there.pop(name), blob]  # it is new again
                added = Append((RESPONSE, name), b"%d" % number, {sha256(blob).digest(): blob})
                file.apply([Replace((RESPONSE, name), None, ended=True), added], number)
            case _:
                there[f"ann:{number}"] = [*(there.get(name, []) if act == "go on" else []), blob]
                file.apply([response("ann", number, *there[f"ann:{number}"])], number)
        left = names(file)
        assert left == list(there)[len(there) - len(left) :]
        there = {name: there[name] for name in left}
        for name, blobs_of_it in there.items():
            found = file.read((RESPONSE, name))
            assert found is not None
            assert set(found.blobs.values()) == set(blobs_of_it)
        assert len(there) <= count_max
        [own] = file._base.run("SELECT coalesce(sum(bytes), 0) FROM entries").fetchone()
        assert own <= bytes_max
        [count] = file._base.run("SELECT count(*) FROM blobs").fetchone()
        assert count == len({blob for some in there.values() for blob in some})
    file.close()


def test_a_file_of_the_first_version_is_converted(path: Path) -> None:
    """Owners were digests of keys, and sizes had all blobs that an entry shares."""
    digest = sha256(b"B" * 50).digest()
    file = JournalFile(path, BYTES_MAX, 0.0)
    file.apply([Put((RESPONSE, "abcd:r"), b"head", {digest: b"B" * 50}), Put(NAMES[0], b"x")], 0.0)
    file.close()
    with closing(sqlite3.connect(path)) as former:
        former.executescript(
            "DROP INDEX entries_by_owner; ALTER TABLE entries DROP COLUMN owner; PRAGMA user_version = 1"
        )
    for _ in range(2):
        file = JournalFile(path, BYTES_MAX, 0.0, {RESPONSE: Quota(9, 2**20)})
        file.rename_owners({"abcd": "0123", "ef": "4567"})
        assert names(file) == ["0123:r"]
        assert file.read((RESPONSE, "0123:r")) == StoredEntry(b"head", [], {digest: b"B" * 50})
        assert [entry.name for entry in file.entries("answer")] == NAMES[:1]
        file.close()
    file = JournalFile(path, BYTES_MAX, 0.0, {RESPONSE: Quota(0, 0)})
    assert names(file) == [], "where nothing is stored, nothing is left"
    file.close()
