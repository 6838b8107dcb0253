"""Streamed answers: complete blocks of Markdown, the summary below, and the lines in a terminal."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from deploy.console.answer import Answer, drawn, settled
from deploy.console.http import AnswerDelta
from tests.terminal import COLUMNS, Terminal, screen


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("```\n~~~\n\n```\n\nc", "```\n~~~\n\n```\n\n"),
        ("1. a\n\n   more\n\n2. b", ""),
        ("1. a\n\nnot in the list", "1. a\n\n"),
    ],
)
def test_it_is_settled_between_two_blocks(text: str, printed: str) -> None:
    assert text[: settled(text)] == printed


def test_summary_has_tokens_decode_speed_and_time_to_first_token() -> None:
    answer = Answer(began=10.0)
    for at, piece in (
        (10.5, AnswerDelta("thought", "hm")),
        (11.0, AnswerDelta("text", "a")),
        (12.5, AnswerDelta("end", "stop")),
        (99.0, AnswerDelta("usage", tokens=41)),
    ):
        answer.add(piece, at)
    assert answer.summary(99.0) == "41 tokens, 20.0 tokens/s, first token after 0.50 s"
    assert Answer(reason="length").summary(3.0) == "cut off at the maximum number of tokens"
    assert Answer(stopped=True, first_at=1.0, last_at=2.0).summary(3.0) == "stopped after 3.0 s"


def test_a_thought_is_one_line_once_the_answer_begins() -> None:
    console = Console(width=COLUMNS, force_terminal=False, record=True)
    times = iter(range(100))
    pieces = [
        AnswerDelta("thought", "First this,"), AnswerDelta("thought", " then that."),
        AnswerDelta("text", "One.\n\nTwo"), AnswerDelta("text", ".\n\nThree."), AnswerDelta("end", "stop"),
    ]  # fmt: skip
    found = drawn(console, iter(pieces), clock=lambda: float(next(times)))
    lines = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    assert found.text == "One.\n\nTwo.\n\nThree."
    assert lines[0].startswith("▸ reasoned for")
    assert "4 words (/thought)" in lines[0]
    assert lines[1:4] == ["One.", "Two.", "Three."]


WORDS = [f"word{number}" for number in range(1, 3 * COLUMNS // 8)]
ANSWER = f"""
import threading
from rich.console import Console
from deploy.console import answer
from deploy.console.http import AnswerDelta

def pieces():
    yield AnswerDelta("text", {" ".join(WORDS)!r})
    while not threading.Event().wait(0.1):  # a signal just before a long wait is noticed at its end only
        pass

print(answer.drawn(Console(), pieces()).stopped)
"""


def test_ctrl_c_in_an_answer_of_several_lines_prints_each_line_once() -> None:
    terminal = Terminal([sys.executable, "-c", ANSWER], {})
    terminal.wait(WORDS[-1])
    terminal.type("\x03")
    terminal.wait("True")
    assert terminal.end() == 0
    words = " ".join(screen(terminal.output)).split()
    assert words[: len(WORDS) + 1] == [*WORDS, "stopped"]
    assert words[-1] == "True"
