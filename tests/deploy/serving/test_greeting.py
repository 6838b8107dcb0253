"""What a person at a terminal sees of `serve`: the greeting, and when it takes the place of log lines."""

from __future__ import annotations

import pytest

from deploy.serving.greeting import greeting, is_quiet
from deploy.serving.settings import ServeSettings
from deploy.supervisor.child import ServedModel

LINES_MAX = 5
"""Before them, one line says what is loaded."""


def status(*states: tuple[str, str], memory: dict[str, int] | None = None) -> dict[str, object]:
    return {
        "models": [{"model": name, "state": state} for name, state in states],
        "workers": [{"model": states[0][0], "memory": memory, "cache_bytes_max": 2_000_000_000}],
    }


def test_greeting_names_model_memory_addresses_and_the_way_out() -> None:
    served = [ServedModel(name="pocket")]
    document = status(("pocket", "loaded"), memory={"device_bytes": 3_400_000})
    lines = greeting(document, "http://127.0.0.1:8000", served, needs_key=False).splitlines()
    assert lines[0] == "pocket is ready: 3.4 MB of memory, up to 2.0 GB for KV caches"
    assert len(lines) == LINES_MAX


def test_greeting_of_several_models_and_another_port_stays_short() -> None:
    served = [ServedModel(name="small"), ServedModel(name="large")]
    document = status(("small", "loaded"), ("large", "unloaded"))
    lines = greeting(document, "http://[::1]:8001", served, needs_key=True).splitlines()
    assert len(lines) == LINES_MAX
    assert lines[0] == "small is ready; on demand: large"
    assert lines[1].endswith("http://[::1]:8001/v1 (API key required)")
    assert lines[3].endswith("roundhouse chat --port 8001")


@pytest.mark.parametrize(
    ("settings", "to_terminal", "quiet"),
    [({}, True, True), ({}, False, False), ({"verbose": True}, True, False)],
)
def test_log_lines_are_hidden_only_at_a_terminal_where_nobody_asked_for_them(
    settings: dict[str, object], to_terminal: bool, quiet: bool
) -> None:
    assert is_quiet(ServeSettings(**settings), to_terminal=to_terminal) is quiet
