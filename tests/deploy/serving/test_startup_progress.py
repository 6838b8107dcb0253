"""Start-up: the first line, the progress, the hints when the server is ready, and a terminal's greeting."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest

from deploy.serving.settings import ServeSettings
from deploy.serving.startup_progress import StartupProgress, announcement, bar, greeting, is_quiet, words
from deploy.supervisor.child import ServedModel
from tests.deploy.weights import weights
from tests.hosts import endpoint_that_answers
from tests.ports import free_port
from tests.system import eventually

WAIT_S = 20.0
PATH = "/v1/status?history=false"

URL = "http://127.0.0.1:8000"


def status(state: str, done: int = 0, total: int = 0) -> tuple[int, bytes]:
    told = {"done": done, "total": total} if total else None
    document = {"models": [{"model": "m", "state": state}], "workers": [{"model": "m", "loading": told}]}
    return 200, json.dumps(document).encode()


def test_suggested_curl_command_is_complete() -> None:
    command = shlex.split(words(URL, ["m"], needs_key=True).partition("try: ")[2])
    assert command[:2] == ["curl", f"{URL}/v1/chat/completions"]
    assert json.loads(command[-1])["messages"][0]["role"] == "user"
    assert "authorization: Bearer YOUR-KEY" in command


def test_it_is_said_once_what_serves_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with endpoint_that_answers({PATH: status("loaded")}) as served, StartupProgress(served.url, ["sesame"]):
        eventually(lambda: caplog.records, within_s=WAIT_S)
    [record] = caplog.records
    assert record.getMessage().startswith(f"serving m at {served.url}/v1; try: curl ")
    assert served.asked == [(PATH, "Bearer sesame")]


def test_a_terminal_sees_a_bar_and_nothing_is_said_yet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    drawn: list[str] = []
    with (
        endpoint_that_answers({PATH: status("loading", 1, 4)}) as served,
        StartupProgress(served.url, draw=drawn.append),
    ):
        eventually(lambda: drawn, within_s=WAIT_S)
    assert screen(drawn[0]) == f"{bar(0.25)} 25%"
    assert not caplog.records
    line = "02:33:13 serve    x"
    assert screen(drawn[0] + line) == line, "the bar is seen behind a log line"


def screen(written: str) -> str:
    """Return what a terminal shows in the line, in which `\\r` returns to the first column."""
    shown = ""
    for part in written.rpartition("\x1b[K")[2].split("\r"):
        shown = part + shown[len(part) :]
    return shown


def test_whatever_else_answers_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with endpoint_that_answers({PATH: (200, b"<html>")}) as served, StartupProgress(served.url):
        eventually(lambda: len(served.asked) > 1, within_s=WAIT_S)
    with StartupProgress(f"http://127.0.0.1:{free_port()}"):
        pass
    assert not caplog.records


def test_of_several_it_says_what_is_loaded_first_and_what_when_asked_for(tmp_path: Path) -> None:
    models = [
        ServedModel(name="a", model=weights(tmp_path / "a", 1000)),
        ServedModel(name="b", model=weights(tmp_path / "b", 2_500_000_000), resident=True),
        ServedModel(name="c", model="org/never-fetched-model", resident=True),
    ]
    line = announcement(URL, models)
    assert announcement(URL, [ServedModel(name="pocket")]) == f"opening {URL}/v1, loading pocket (3.4 MB)"
    assert line == (f"opening {URL}/v1, loading b (2.5 GB), c (not downloaded yet); on demand: a")


# --- greeting ------------------------------------------------------------------------------------------

LINES_MAX = 5
"""Before them, one line says what is loaded."""


def documented(*states: tuple[str, str], memory: dict[str, int] | None = None) -> dict[str, object]:
    return {
        "models": [{"model": name, "state": state} for name, state in states],
        "workers": [{"model": states[0][0], "memory": memory, "cache_bytes_max": 2_000_000_000}],
    }


def test_greeting_names_model_memory_addresses_and_the_way_out() -> None:
    served = [ServedModel(name="pocket")]
    document = documented(("pocket", "loaded"), memory={"device_bytes": 3_400_000})
    lines = greeting(document, "http://127.0.0.1:8000", served, needs_key=False).splitlines()
    assert lines[0] == "pocket is ready: 3.4 MB of memory, up to 2.0 GB for KV caches"
    assert len(lines) == LINES_MAX


def test_greeting_of_several_models_and_another_port_stays_short() -> None:
    served = [ServedModel(name="small"), ServedModel(name="large")]
    document = documented(("small", "loaded"), ("large", "unloaded"))
    lines = greeting(document, "http://[::1]:8001", served, needs_key=True).splitlines()
    assert len(lines) == LINES_MAX
    assert lines[0] == "small is ready; on demand: large"
    assert lines[1].endswith("http://[::1]:8001/v1 (API key required)")
    assert lines[3].endswith("roundhouse chat --host ::1 --port 8001")


@pytest.mark.parametrize(
    ("settings", "to_terminal", "quiet"),
    [({}, True, True), ({}, False, False), ({"verbose": True}, True, False)],
)
def test_log_lines_are_hidden_only_at_a_terminal_where_nobody_asked_for_them(
    settings: dict[str, object], to_terminal: bool, quiet: bool
) -> None:
    assert is_quiet(ServeSettings(**settings), to_terminal=to_terminal) is quiet
