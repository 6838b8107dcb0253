"""`make conformance`: its lanes and their evaluation, with real programs and without SDKs or servers."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.conformance.__main__ import LANES, NotRun, commanded, conclude, driven, main
from tests.conformance.drivers import Driver, Environment
from tests.conformance.environments import NotMade, command_of, make, variables
from tests.conformance.outcomes import Count, Outcome
from tests.conformance.programs import run
from tests.system import eventually

PASSED = Outcome("sdks", "a", 0, Count(1, 1))
FAILED = Outcome("sdks", "b", 1, Count(0, 1))
NOT_RUN = NotRun("c (no npm)")
EMPTY = Environment("empty", "python", ())


def run_code(code: str, folder: Path) -> Outcome:
    return run("sdks", "a", [sys.executable, "-uc", code], os.environ, folder)


def test_program_output_is_printed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('OK a'); print('well', file=sys.stderr); print('1/2'); sys.exit(3)"
    outcome = run_code(code, tmp_path)
    assert (outcome.status, outcome.count) == (3, Count(1, 2))
    assert capsys.readouterr().out == "OK a\nwell\n1/2\n"


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdout.close(); open('fifo')"]
    os.mkfifo(tmp_path / "fifo")  # no process writes to it
    outcome = run("sdks", "a", command, os.environ, tmp_path, within_s=0.5)
    assert outcome.status == -9
    assert not outcome.passed


def test_child_processes_of_a_program_end_with_it(tmp_path: Path) -> None:
    sleeper = "subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    code = f"import subprocess; open('pid', 'w').write(str({sleeper}.pid)); print('1/1')"
    assert run_code(code, tmp_path).passed
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), within_s=10, what="it has ended")


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("came", "status"),
    [
        ([PASSED], 0),
        ([PASSED, NOT_RUN], 0),
        ([PASSED, FAILED], 1),
        ([NOT_RUN], 1),  # no check has passed
        ([], 1),
    ],
)
def test_the_status_is_0_if_something_was_run_and_all_of_it_passed(
    came: list[Outcome | NotRun], status: int
) -> None:
    page = io.StringIO()
    assert conclude(came, Console(file=page, width=200)) == status
    assert ("not run: c (no npm)" in page.getvalue()) == (NOT_RUN in came)


def test_a_lane_without_its_program_or_module_is_not_run() -> None:
    assert commanded("a", "tests.conformance.agents", "no-such-program") == NotRun("a (no no-such-program)")
    assert commanded("a", "tests.no_such_module", sys.executable) == NotRun("a (no tests.no_such_module)")


def test_a_lane_that_is_a_command_is_run() -> None:
    outcome = commanded("a", "this", sys.executable)  # a module that prints text, but no count
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.count, outcome.passed) == (0, None, True)


def test_strangers_in_a_folder_of_drivers_are_told(tmp_path: Path) -> None:
    (tmp_path / "new_sdk.py").touch()
    assert list(driven("sdks", tmp_path)) == [NotRun("new_sdk.py (no such driver in the table)")]


@pytest.mark.parametrize("argv", [["no-such-lane"], ["--clients", "no/such/folder"]])
def test_unknown_lane_or_client_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, *LANES])
    assert ended.value.code == 2
    assert "no such" in capsys.readouterr().err


def test_an_environment_is_made_again_when_its_packages_have_changed(tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    (place / ".packages").write_text("")
    (place / "made").touch()
    assert make(EMPTY, tmp_path) == place.resolve()
    assert (place / "made").exists()
    with pytest.raises(NotMade):
        make(Environment("empty", "python", ("not a package",)), tmp_path)
    assert not (place / "made").exists()
    with pytest.raises(NotMade):  # an incomplete environment
        make(Environment("empty", "python", ("not a package",)), tmp_path)


def test_javascript_is_run_beside_what_it_imports_and_leaves_nothing_there(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    place.mkdir()
    for name in ("ai_sdk.mjs", "common.mjs", "notes.txt"):
        (source / name).write_text(name)
    driver = Driver(source / "ai_sdk.mjs", Environment("place", "javascript", ()))
    with command_of(driver, place) as (program, path):
        copied = Path(path)
        assert program == "node"
        assert copied.parent.parent == place
        assert {each.name for each in copied.parent.iterdir()} == {"ai_sdk.mjs", "common.mjs"}
    assert list(place.iterdir()) == []


def test_a_driver_gets_our_variables_but_none_that_lead_it_to_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPABLE", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    told = variables(tmp_path, "http://127.0.0.1:1")
    assert (told["BASE_URL"], told["CAPABLE"]) == ("http://127.0.0.1:1", "1")
    assert "PYTHONPATH" not in told
