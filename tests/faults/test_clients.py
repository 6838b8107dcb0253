"""Clients that do not read, and clients that go: `tests.faults.clients` for a moment."""

from __future__ import annotations

from pathlib import Path

from tests.faults import clients, freeing
from tests.faults.raw import on_uvloop
from tests.system import running_system


def test_who_does_not_read_and_who_goes_cost_the_gateway_nothing_that_lasts(tmp_path: Path) -> None:
    flags = ["--read-timeout", "0.5", "--log-level", "warning"]
    with running_system(tmp_path, flags) as system:
        clients.start(system)
        crowd = clients.Crowd(system, seed=3, text="x" * 20_000)
        outcome = on_uvloop(crowd.run(unread=4, leaving=60, window_s=1.0))
    assert outcome.remains == ""
    assert sum(outcome.left.values()) == 60
    assert outcome.growth <= clients.GROWTH_BYTES_MAX


def test_a_row_is_another_s_once_its_client_has_gone(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--step-ms", "20", "--max-running", "1")
        system.wait_ready()
        for text in ("!tokens=5000", "go " * 8000 + "!prefill=100 !tokens=5"):
            # Each of them would keep the row for far longer than anybody waits here, were it not free.
            assert len(on_uvloop(freeing.freed_after(system, text, 0.02, tries=2, seed=1))) == 2
        assert system.gateway.log().count("client left after") == 4
