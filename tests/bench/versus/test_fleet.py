"""A server that fails is stopped and gets no more requests."""

from __future__ import annotations

from pathlib import Path

import psutil

from bench.processes import running, wait_until
from bench.rivals import Server
from bench.versus.fleet import Fleet
from bench.versus.turns import Values

SLEEPER = "import time; time.sleep(60)"


def sleeping(name: str, process: psutil.Process) -> Server:
    return Server(name, "http://127.0.0.1:1", process)


def test_a_side_that_fails_is_killed_before_the_next_has_its_turn(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    path = {"PYTHONPATH": str(tmp_path)}
    with running("sleeper", [], path) as bad, running("sleeper", [], path) as good:
        fleet = Fleet([sleeping("bad", bad), sleeping("good", good)], {"absent": "not installed"})

        def turn(server: Server, number: int) -> Values:
            if server.name == "bad":
                raise TimeoutError
            wait_until(lambda: bad.status() == psutil.STATUS_ZOMBIE, "it lives")
            return {"rate": 1.0}

        taken = fleet.take_turns(turn, rounds=1)
        assert good.is_running()
        assert {name: each.note for name, each in taken.items()} == {
            "bad": "round 0: TimeoutError",
            "good": None,
            "absent": "not installed",
        }
        assert [each.name for each in fleet.up] == ["good"]
        assert set(fleet.missing) == {"bad", "absent"}
