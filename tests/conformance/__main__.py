"""Tests that are too slow for every commit: real SDKs and agents, each in its own environment, under
.venv/conformance or CONFORMANCE_DIR. Variables (CAPABLE=1) are passed to the drivers. The status is 1 if
anything failed, or if nothing was run: make conformance [LANES="sdks agents"] [CLIENTS=DIR] [CAPABLE=1 …]"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance.drivers import Driver, drivers_in
from tests.conformance.environments import INSTALLED, NotMade, command_of, make, missing, variables
from tests.conformance.programs import Outcome, run, serving, shared_cache
from tests.conformance.servers import HOUSES, MODEL, opened

SMOKES = Path(__file__).parent / "smokes"

COMMANDS: dict[str, tuple[str, str | None]] = {
    "agents": ("tests.conformance.agents", "npm"),
    "fuzz": ("tests.conformance.fuzz", None),
    "loads": ("tests.conformance.loads", None),
    "newest": ("recipes.installed", None),
    "recipes": ("tests.conformance.recipes", None),
}
"""Lanes that are commands and install what they need: the module, and a required program."""
COMMAND_S_MAX = 7200
LANES = ("sdks", *HOUSES, *COMMANDS)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A driver or lane that could not be run. `what`: its name, with the reason."""

    what: str


def driven(lane: str, clients: Path) -> Iterator[Outcome | NotRun]:
    """Run the lane's drivers in a folder and yield the outcomes. Raises `OSError`."""
    drivers, others = drivers_in(clients)
    yield from (NotRun(f"{name} (no such driver in the table)") for name in others if lane == "sdks")
    for driver in drivers:
        if lane == "sdks" or HOUSES[lane].concerns(driver):
            absent = missing(driver.environment)
            yield NotRun(f"{lane} {driver.name} (no {absent})") if absent else _drive(lane, driver)


def _drive(lane: str, driver: Driver) -> Outcome:
    """Run a driver in its environment against a new server, so that drivers do not affect each other."""
    print(f"=== {lane} {driver.name}", flush=True)
    try:
        return _drive_in(make(driver.environment, INSTALLED), lane, driver)
    except NotMade as error:
        print(error)
        return Outcome(f"{lane} {driver.name}", None, why="no environment")
    except AssertionError as error:  # from the server
        print(error)
        return Outcome(f"{lane} {driver.name}", None, why="the server did not start or not stop")


def _drive_in(place: Path, lane: str, driver: Driver) -> Outcome:
    with (
        _served(lane, driver) as (url, told),
        command_of(driver, place) as command,
        tempfile.TemporaryDirectory(prefix="rh-") as folder,
    ):
        return run(f"{lane} {driver.name}", command, {**variables(place, url), **told}, Path(folder))


@contextlib.contextmanager
def _served(lane: str, driver: Driver) -> Iterator[tuple[str, Mapping[str, str]]]:
    if lane == "sdks":
        with serving() as served:
            yield served.url, {"MODEL": served.model}
        return
    with opened(HOUSES[lane]) as url:
        yield url, {"MODEL": MODEL, **HOUSES[lane].variables(driver)}


def commanded(lane: str, module: str, needed: str | None) -> Outcome | NotRun:
    if needed and shutil.which(needed) is None:
        return NotRun(f"{lane} (no {needed})")
    print(f"=== {lane}", flush=True)
    command = [sys.executable, "-m", module]
    outcome = run(lane, command, os.environ, Path.cwd(), within_s=COMMAND_S_MAX)
    return replace(outcome, must_count=False)


def run_lanes(lanes: Sequence[str], clients: Path) -> Iterator[Outcome | NotRun]:
    for lane in ("sdks", *HOUSES):
        if lane in lanes:
            yield from driven(lane, clients)
    yield from (commanded(lane, *command) for lane, command in COMMANDS.items() if lane in lanes)


def conclude(came: Sequence[Outcome | NotRun]) -> int:
    outcomes = [one for one in came if isinstance(one, Outcome)]
    for outcome in outcomes:
        count = "{}/{}".format(*outcome.count) if outcome.count else "-"
        print(f"{outcome.name}: {count}, {'passed' if outcome.passed else f'FAILED, {outcome.why}'}")
    for one in came:
        if isinstance(one, NotRun):
            print(f"not run: {one.what}")
    return 0 if outcomes and all(outcome.passed for outcome in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--clients", type=Path, default=SMOKES, metavar="DIR", help="a folder of drivers")
    parser.add_argument("lanes", nargs="*", metavar="lane", help=f"of {', '.join(LANES)}; default: all")
    told = parser.parse_args(argv)
    if strangers := set(told.lanes) - set(LANES):
        parser.error(f"no such lane: {', '.join(sorted(strangers))}")
    if not told.clients.is_dir():
        parser.error(f"no such folder: {told.clients}")
    with shared_cache():
        came = list(run_lanes(told.lanes or LANES, told.clients))
    return conclude(came)


if __name__ == "__main__":
    raise SystemExit(main())
