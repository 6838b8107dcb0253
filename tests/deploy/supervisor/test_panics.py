"""A machine that ended under a model is recognized at the next start, and the model gets less memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from deploy.supervisor.panics import CLEAN_RUN_S, Panics
from protocol.breadcrumbs import VARIABLE, BreadcrumbWriter
from tests.deploy.supervisor.process_output import Begin

MODEL = "mlx-community/Qwen3-8B-4bit"
AFTER = 2e9
"""A boot after all files of these tests, if they are dated before it."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def panicked(folder: Path, model: str | None = MODEL, line: str = "at step 7") -> None:
    """Leave the file that a worker leaves when the machine ends: unlocked, and older than the boot."""
    run = Panics(folder).open_slot(model)
    BreadcrumbWriter({VARIABLE: str(run.fd)}).note(line)
    (file,) = folder.glob("*.run")
    copy = file.with_name(file.name.replace(".run", "-copy.run"))
    copy.write_bytes(file.read_bytes())
    run.close()
    os.utime(copy, (AFTER - 60, AFTER - 60))


def test_the_model_under_which_the_machine_ended_gets_less_memory(tmp_path: Path) -> None:
    panicked(tmp_path)
    panics = Panics(tmp_path, boot_at=AFTER)
    assert "the machine ended while it ran (at step 7): its caches get 50%" in panics.caution(MODEL)
    assert panics.caution("another") == ""
    assert not list(tmp_path.glob("*.run"))
    assert Panics(tmp_path, boot_at=AFTER).caution(MODEL)  # until a clean run


@pytest.mark.parametrize(("lived_s", "clears"), [(CLEAN_RUN_S, True), (CLEAN_RUN_S - 1, False)])
def test_a_long_run_with_another_end_clears_the_model(tmp_path: Path, lived_s: float, clears: bool) -> None:
    panicked(tmp_path)
    clock = Clock()
    panics = Panics(tmp_path, boot_at=AFTER, clock=clock)
    run = panics.open_slot(None)
    clock.now += 2 * CLEAN_RUN_S  # the life of a spare counts from its model on
    run.assign(MODEL)
    clock.now += lived_s
    run.close()
    assert (panics.caution(MODEL) == "") == clears


def test_files_in_use_and_those_of_spares_are_no_panic(tmp_path: Path) -> None:
    panicked(tmp_path, model=None)
    run = Panics(tmp_path).open_slot(MODEL)
    assert Panics(tmp_path, boot_at=AFTER).caution(MODEL) == ""
    assert len(list(tmp_path.iterdir())) == 1
    run.close()
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("a file")
    panics = Panics(tmp_path / "runs", boot_at=AFTER)
    assert "would not be noticed" in caplog.text
    assert (panics.caution(MODEL), panics.open_slot(MODEL).close()) == ("", "")


def test_a_worker_after_a_panic_is_told_its_share(tmp_path: Path, begin: Begin) -> None:
    runs = tmp_path / "runs"
    panicked(runs)
    (tmp_path / "says_its_flags.py").write_text(
        "import os, sys\n"
        "print('flags', sys.argv[1:], len(os.listdir(sys.argv[1])), flush=True)\n"
        "sys.exit(78)\n"
    )
    script = f"""
import logging, os, pathlib, sys
from deploy.supervisor.child import Child, ServedModel
from deploy.supervisor.panics import Panics
from deploy.supervisor.supervisor import Supervisor
logging.basicConfig(format="%(message)s")
served = ServedModel(name="qwen", model={MODEL!r})
argv = [sys.executable, "-m", "says_its_flags", {str(runs)!r}]
child = Child("worker", argv, {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}}, model=served)
sys.exit(Supervisor([child], panics=Panics(pathlib.Path({str(runs)!r}), boot_at={AFTER})).run())
"""
    told = begin([sys.executable, "-c", script])
    assert told.wait() == 78
    flags = next(line for line in told.lines if line.startswith("flags"))
    assert "'--cache-share=0.5'" in flags
    assert flags.endswith(" 2")  # the record, and its own file
    assert any("qwen: the machine ended while it ran (at step 7)" in line for line in told.lines)
    assert [file.suffix for file in runs.iterdir()] == [".panic"]
