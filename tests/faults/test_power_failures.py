"""Power failures: a short run of `python -m tests.faults.power_failures`, and what a frozen disk lacks."""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

from broker.journal.file import Append, JournalFile, Put
from tests.faults.frozen_disk import FrozenDisk
from tests.faults.power_failures import VICTIMS, check

BYTES_MAX = 2**20
NAME = ("answer", "a")
DISKS = 24


def test_nothing_that_was_answered_is_lost_or_repeated_when_one_or_all_processes_die(tmp_path: Path) -> None:
    given = argparse.Namespace(kills=len(VICTIMS), responses=4, lines=8, frozen=1.0)
    given.interval, given.seed, given.victims = 1.0, 1, ",".join(VICTIMS)
    assert check(tmp_path, given) == []


def test_a_frozen_disk_has_what_a_client_was_told_and_any_part_of_what_came_later(tmp_path: Path) -> None:
    here = tmp_path / "journal" / "journal.sqlite"
    file, disk = JournalFile(here, BYTES_MAX, 0.0), FrozenDisk(here, tmp_path, random.Random(1))
    file.apply([Put(NAME, b"told"), Append(NAME, b"0")], 0.0)
    disk.note()
    for number in range(1, 4):
        file.apply([Append(NAME, b"%d" % number)], 0.0)
    images = tmp_path / "images"
    shutil.copytree(here.parent, images)
    file.close()
    found: set[int] = set()
    for _ in range(DISKS):
        shutil.rmtree(here.parent)
        shutil.copytree(images, here.parent)
        disk.freeze()
        file = JournalFile(here, BYTES_MAX, 0.0)
        [entry] = file.entries("answer")
        file.close()
        assert entry.head == b"told"
        assert entry.items == [b"%d" % number for number in range(len(entry.items))]
        found.add(len(entry.items))
    assert found == {1, 2, 3, 4}
