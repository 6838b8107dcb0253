"""Streamed answers in a real terminal."""

from __future__ import annotations

import sys

from tests.terminal import COLUMNS, Terminal, screen

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
