"""Evaluation of load generators' reports; `make conformance` runs the generators themselves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.loads import CLIENTS, Bench, Failed, check_samples, main
from tests.conformance.programs import Served


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Path(sys.executable).parent, Served("http://127.0.0.1:1", "pocket"), tmp_path)


@pytest.mark.parametrize("answers", [[["-1.5", "False"]], ["a word"]])
def test_a_likelihood_or_a_text_is_an_answer(answers: list[Any]) -> None:
    check_samples(iter([{"resps": [answers]}]))


@pytest.mark.parametrize("answer", [["nan", "False"], ["-inf", "False"], ["0.0", "True"], ""])
def test_invalid_sample_fails(answer: Any) -> None:
    with pytest.raises(Failed, match="no answer"):
        check_samples(iter([{"resps": [[answer]]}]))


def test_a_program_that_fails_is_told_with_what_it_said(bench: Bench) -> None:
    bench.run("python", "-c", "print('well')")
    with pytest.raises(Failed, match=r"status 3\nnot well"):
        bench.run("python", "-c", "print('not well'); raise SystemExit(3)")


def test_a_report_must_be_there(bench: Bench) -> None:
    with pytest.raises(Failed, match="no report"):
        bench.report("**/report*.json")
    (bench.folder / "report-1.json").write_text(json.dumps({"requests": 8}))
    assert bench.report("report*.json") == {"requests": 8}


def test_client_packages_are_pinned() -> None:
    for client in CLIENTS.values():
        assert client.checks > 0
        assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==\d[\d.]*", package) for package in client.packages)


def test_strangers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-client"])
    assert "no such client" in capsys.readouterr().err
