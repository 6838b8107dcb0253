"""The journal's file: a model of what must be in it, and damage of every kind."""

from __future__ import annotations

import shutil
import stat
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.journal.database import DamagedError, remove
from broker.journal.file import (
    AGE_S_MAX,
    Append,
    Delete,
    JournalFile,
    Operation,
    Put,
    Replace,
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
    file = JournalFile(path, 4000, 0.0)
    file.apply([Put(("answer", "open"), b"x" * 1000)], 1.0)
    for number in range(4):
        file.apply([Put(("answer", str(number)), b"x" * 1000, ended=True)], 2.0 + number)
    assert {entry.name[1] for entry in file.entries("answer")} == {"open", "2", "3"}
    file.apply([Put(("answer", "large"), b"x" * 3000)], 9.0)
    assert {entry.name[1] for entry in file.entries("answer")} == {"open"}
    assert file.refused == 1
    file.apply([Append(("answer", "large"), b"without effect")], 9.0)
    file.apply([Put(("answer", "new"), b"new")], AGE_S_MAX / 2)
    file.close()
    file = JournalFile(path, 4000, AGE_S_MAX * 1.1)  # when it is opened, old ones are removed
    assert {entry.name[1] for entry in file.entries("answer")} == {"new"}
    file.close()
