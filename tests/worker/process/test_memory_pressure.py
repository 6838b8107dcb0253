"""The machine's memory pressure, from files in PSI's format and from the C library of macOS."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest

from worker.process.memory_pressure import PressureLevel, StallFiles, pressure_source, read_sysctl

NONE, WARNING, CRITICAL = PressureLevel


def psi(some: float, full: float | None = None) -> str:
    lines = {"some": some} if full is None else {"some": some, "full": full}
    return "".join(
        f"{kind} avg10={share:.2f} avg60=1.50 avg300=0.63 total=12\n" for kind, share in lines.items()
    )


@pytest.mark.parametrize(
    ("contents", "level"),
    [
        ([psi(0, 0)], NONE),
        ([psi(9.9, 9.9)], NONE),
        ([psi(10, 0)], WARNING),
        ([psi(39.9)], WARNING),
        ([psi(40)], CRITICAL),
        ([psi(20, 10)], CRITICAL),
        ([psi(0, 0), psi(12, 3)], WARNING),
        ([psi(40, 30), psi(12, 3)], CRITICAL),
        ([""], NONE),
        ([], NONE),
    ],
)
def test_the_worst_file_decides(contents: list[str], level: PressureLevel, tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    assert StallFiles(files)() is level


def test_a_file_that_tells_nothing_is_logged_once_and_the_others_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(psi(20))
    bad.write_text("some avg10=much\n")
    source = StallFiles([tmp_path / "missing", bad, good])
    assert [source(), source()] == [WARNING, WARNING]
    assert len(caplog.records) == 2


def test_this_machine_tells_a_level_or_none() -> None:
    assert pressure_source()() in PressureLevel


class Darwin:
    """The C library of macOS, with the kernel's level; None: it does not know the name."""

    def __init__(self, value: int | None) -> None:
        self._value = value

    def sysctlbyname(self, name: bytes, old: Any, size: Any, new: Any, length: int) -> int:
        assert (name, new, length) == (b"kern.memorystatus_vm_pressure_level", None, 0)
        assert ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t)).contents.value == 4
        if self._value is None:
            return -1
        ctypes.cast(old, ctypes.POINTER(ctypes.c_int)).contents.value = self._value
        return 0


@pytest.mark.parametrize(
    ("value", "level"), [(1, NONE), (2, WARNING), (4, CRITICAL), (0, NONE), (None, NONE)]
)
def test_the_kernel_of_macos_tells_its_level(value: int | None, level: PressureLevel) -> None:
    assert read_sysctl(Darwin(value)) is level
