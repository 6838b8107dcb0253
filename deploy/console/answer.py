"""Display of a streamed answer: its text as Markdown, its reasoning in one line.

Without a terminal, only the plain text is printed, without reasoning.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from deploy.console.http import AnswerDelta

DRAWS_PER_S = 12
THOUGHT_CHARS_SHOWN = 60

_FENCES = ("```", "~~~")


@dataclass(slots=True)
class Answer:
    """An answer received so far. `stopped`: by the user, before its end. `reason`: its finish reason."""

    text: str = ""
    thought: str = ""
    reason: str = ""
    stopped: bool = False


def plain(console: Console, pieces: Iterable[AnswerDelta]) -> Answer:
    """Print the text unchanged as it arrives."""
    answer = Answer()
    for piece in pieces:
        _take(answer, piece)
        if piece.kind == "text":
            console.out(piece.text, end="", highlight=False)
    console.out("", highlight=False)
    return answer


def drawn(console: Console, pieces: Iterable[AnswerDelta]) -> Answer:
    """Draw the answer as Markdown. Ctrl-C ends it early."""
    answer = Answer()
    screen = _Screen(console)
    try:
        for piece in pieces:
            _take(answer, piece)
            screen.show(answer)
    except KeyboardInterrupt:
        answer.stopped = True
    finally:
        screen.close(answer)
    if answer.stopped:
        console.print("stopped", style="dim")
    elif answer.reason == "length":
        console.print("cut off at the maximum number of tokens", style="dim")
    return answer


def _take(answer: Answer, piece: AnswerDelta) -> None:
    match piece.kind:
        case "text":
            answer.text += piece.text
        case "thought":
            answer.thought += piece.text
        case "end":
            answer.reason = piece.text


class _Screen:
    """Screen that prints finished text once, and redraws the rest."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
        self._live.start()
        self._printed = 0
        self._drawn_at = 0.0
        self._began = time.monotonic()
        self._folded = False

    def show(self, answer: Answer) -> None:
        now = time.monotonic()
        if now - self._drawn_at < 1 / DRAWS_PER_S:
            return
        self._drawn_at = now
        self._fold(answer)
        end = settled(answer.text)
        if end > self._printed:
            self._live.console.print(Markdown(answer.text[self._printed : end]))
            self._printed = end
        if answer.text:
            self._live.update(Markdown(answer.text[self._printed :]), refresh=True)
        elif answer.thought:
            last = " ".join(answer.thought.split())[-THOUGHT_CHARS_SHOWN:]
            self._live.update(Text(f"reasoning: …{last}", "dim italic"), refresh=True)

    def _fold(self, answer: Answer) -> None:
        """Replace the reasoning by one line once the text begins."""
        if answer.text and answer.thought and not self._folded:
            self._folded = True
            took = time.monotonic() - self._began
            words = len(answer.thought.split())
            self._live.console.print(f"▸ reasoned for {took:.1f} s, {words} words (/thought)", style="dim")

    def close(self, answer: Answer) -> None:
        self._fold(answer)
        self._live.update(Text(), refresh=True)
        self._live.stop()
        if rest := answer.text[self._printed :].strip():
            self._console.print(Markdown(rest))


def settled(text: str) -> int:
    """Return the length of the longest prefix that ends between two blocks: after an empty line outside of a
    code fence, if the next line does not continue the block before it."""
    end, position, fence, was_empty = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if was_empty and not fence and stripped and not _goes_on(line):
            end = position
        mark = stripped[:3]
        if mark in _FENCES:
            fence = "" if fence == mark else fence or mark
        was_empty = not stripped and line.endswith("\n")
        position += len(line)
    return end


def _goes_on(line: str) -> bool:
    """Return whether a line may belong to the list above it: it is indented, or a list item."""
    stripped = line.lstrip()
    is_item = stripped[:2] in ("- ", "* ", "+ ") or stripped.split(".")[0].isdigit()
    return line[0] in " \t" or is_item
