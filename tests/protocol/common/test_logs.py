"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.common import logs
from protocol.common.log_context import about

WAIT_S = 20.0

log = logging.getLogger("tests.logs")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore pytest's handlers of the root logger, which `setup` replaces."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Logging error" not in captured.err
    return captured.err.removesuffix("\n").split("\n")


def documents(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(capsys)]


def test_a_line_for_a_person_has_clock_process_level_and_the_name_of_the_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("gateway", "text", "debug")
    log.info("listening at %s", "http://here")
    log.debug("a")
    log.warning("b", extra=about("b"))
    log.critical("c 200", extra=about("c", request_id="req_1", seconds=0.5))
    first, *others = lines(capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d gateway  listening at http://here", first)
    ends = [line.split("gateway  ")[1] for line in others]
    assert ends == ["debug: a", "warning: b", "critical: c 200 [req_1]"]


def test_a_line_for_a_machine_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("gateway")
    logs.setup("gateway", "json", "warning")  # only the second counts
    before = time.time()
    log.info("below the level")
    log.warning('said "%s"\nand went', "駅 \x00 \u2028", extra=about())
    log.warning("folder %s", "caf\udce9")  # how Python spells a name in Latin-1
    log.warning("a 200", extra=about("chatcmpl-1", request_id="req_1", seconds=0.5, message="another"))
    line, folder, request = documents(capsys)
    assert line.keys() == {"time", "level", "process", "message"}
    assert (line["level"], line["process"]) == ("warning", "gateway")
    assert line["message"] == 'said "駅 \x00 \u2028"\nand went'
    assert before - 0.001 <= line["time"] <= time.time() + 0.001
    assert folder["message"].startswith("folder caf")
    assert (request["id"], request["request_id"], request["seconds"]) == ("chatcmpl-1", "req_1", 0.5)
    assert request["message"] == "a 200"


def test_a_log_that_is_not_read_just_now_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.setup("gateway")
        ended = threading.Event()

        def talk() -> None:
            for _ in range(50):
                log.info("x" * 4096)
            ended.set()

        threading.Thread(target=talk, daemon=True).start()
        try:
            assert ended.wait(WAIT_S)
        finally:
            os.set_blocking(reader, False)
            while select.select((reader,), (), (), 0)[0]:
                os.read(reader, 2**16)
        log.info("somebody reads again")
        told = os.read(reader, 2**16).decode().splitlines()
        os.close(reader)
    assert told[0].endswith("somebody reads again")
    assert re.search(r"warning: \d+ bytes of log lines were dropped", told[1])


def test_a_traceback_follows_the_line_for_a_person_and_is_a_field_for_a_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for form in ("text", "json"):
        logs.setup("worker", form)
        try:
            raise RuntimeError("it broke")
        except RuntimeError:
            log.exception("step failed")
    first, *traceback, last = lines(capsys)
    assert first.endswith("error: step failed")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "RuntimeError: it broke"
    document = json.loads(last)
    assert document["message"] == "step failed"
    assert document["traceback"].splitlines() == traceback


def test_libraries_are_heard_only_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("worker", "json", "debug")
    logging.getLogger("httpx").info("HTTP Request")
    logging.getLogger("transformers").warning("a slow tokenizer")
    assert [line["message"] for line in documents(capsys)] == ["a slow tokenizer"]


# --- rate limit of repeated lines --------------------------------------------------------------------


def said_of(
    sparse: logs.RateLimitFilter, count: int, wording: str = "dropped %s", level: int = logging.WARNING
) -> list[str]:
    """Return the messages of `count` equal lines that pass the filter."""
    records = [logging.LogRecord("a", level, "", 0, wording, (number,), None) for number in range(count)]
    return [record.getMessage() for record in records if sparse.filter(record)]


def test_one_wording_is_let_through_a_few_times_and_then_counted() -> None:
    now = 100.0
    sparse = logs.RateLimitFilter(logging.WARNING, clock=lambda: now)
    assert said_of(sparse, 1000) == [f"dropped {number}" for number in range(logs.LINES_MAX)]
    assert said_of(sparse, 1, "another %s") == ["another 0"]
    now += logs.PERIOD_S
    left_out = 1000 - logs.LINES_MAX
    assert said_of(sparse, 2) == [f"dropped 0 (and {left_out} more like it before)", "dropped 1"]
    now += logs.PERIOD_S
    assert said_of(sparse, 1) == ["dropped 0"]
    assert len(said_of(sparse, 1000, level=logging.INFO)) == 1000
    # Old wordings are forgotten.
    assert all(said_of(sparse, 1, f"wording {number} %s") for number in range(2 * logs.WORDINGS_MAX))


def test_warnings_are_sparse_and_other_lines_where_their_logger_or_one_above_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("gateway", sparse=["house.named"])
    names = ("house.named", "house.named.below", "house.named_alike", "house")
    for number in range(logs.LINES_MAX + 30):
        log.warning("a warning %d", number)
        for name in names:
            logging.getLogger(name).info("%s again %d", name, number)
    found = lines(capsys)
    assert sum("a warning" in line for line in found) == logs.LINES_MAX
    counts = [sum(f" {name} again" in line for line in found) for name in names]
    assert counts == [logs.LINES_MAX] * 2 + [logs.LINES_MAX + 30] * 2
