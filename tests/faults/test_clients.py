"""Clients that do not read or that disconnect: a short run of `tests.faults.clients`."""

from __future__ import annotations

from pathlib import Path

from tests.faults import clients, freeing
from tests.faults.raw import on_uvloop
from tests.system import running_system


def test_stalled_and_disconnected_clients_leave_no_residue_in_the_gateway(tmp_path: Path) -> None:
    flags = ["--read-timeout", "0.5", "--log-level", "warning"]
    with running_system(tmp_path, flags) as system:
        clients.start(system)
        crowd = clients.Crowd(system, seed=3, text="x" * 20_000)
        outcome = on_uvloop(crowd.run(unread=4, leaving=30, window_s=0.5))
    assert sum(outcome.left.values()) == 30
    assert outcome.growth <= clients.GROWTH_BYTES_MAX


def test_a_row_is_another_s_once_its_client_has_gone(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        system.start_worker("--step-ms", "20", "--max-running", "1")
        system.wait_ready()
        for text in ("!tokens=5000", "go " * 8000 + "!prefill=100 !tokens=5"):
            # If its row were not freed, each request would occupy it longer than the timeout.
            assert len(on_uvloop(freeing.freed_after(system, text, 0.02, tries=2, seed=1))) == 2
        assert system.gateway.log().count("client left after") == 4
