"""Display of a streamed answer: its text as Markdown, its reasoning in one line.

Without a terminal, only the plain text is printed, without reasoning.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from deploy.console.http import AnswerDelta

DRAWS_PER_S = 12
THOUGHT_CHARS_SHOWN = 60

_FENCES = ("```", "~~~")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(slots=True)
class Answer:
    """An answer received so far. `stopped`: by the user, before its end. `reason`: its finish reason.

    `tokens`: as counted by the server; 0 if it has not said. Times are those of the clock that was given.
    """

    began: float = 0.0
    text: str = ""
    thought: str = ""
    reason: str = ""
    stopped: bool = False
    tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0

    def add(self, piece: AnswerDelta, now: float) -> None:
        match piece.kind:
            case "text":
                self.text += piece.text
            case "thought":
                self.thought += piece.text
            case "end":
                self.reason = piece.text
            case "usage":
                self.tokens = piece.tokens
                return  # follows the last token by a moment
        self.first_at = now if self.first_at is None else self.first_at
        self.last_at = now

    def summary(self, now: float) -> str:
        """Return how it ended, unless by itself, and its token count and decode speed; "" if unknown."""
        if self.stopped:
            return f"stopped after {now - self.began:.1f} s"
        parts = ["cut off at the maximum number of tokens"] if self.reason == "length" else []
        if self.tokens and self.first_at is not None:
            parts.append(f"{self.tokens} token{'s' if self.tokens > 1 else ''}")
            if self.tokens > 1 and self.last_at > self.first_at:
                parts.append(f"{(self.tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
            parts.append(f"first token after {self.first_at - self.began:.2f} s")
        return ", ".join(parts)


def plain(console: Console, pieces: Iterable[AnswerDelta]) -> Answer:
    """Print the text unchanged as it arrives."""
    answer = Answer()
    for piece in pieces:
        answer.add(piece, 0.0)
        if piece.kind == "text":
            console.out(piece.text, end="", highlight=False)
    console.out("", highlight=False)
    return answer


def drawn(
    console: Console, pieces: Iterable[AnswerDelta], clock: Callable[[], float] = time.monotonic
) -> Answer:
    """Draw the answer as Markdown, then its summary. Ctrl-C ends it early."""
    answer = Answer(began=clock())
    with _without_echo(console):
        screen = _Screen(console, clock)
        try:
            for piece in pieces:
                answer.add(piece, clock())
                with _interrupt_deferred():
                    screen.show(answer)
        except KeyboardInterrupt:
            answer.stopped = True
        finally:
            with _interrupt_deferred():
                screen.close(answer)
    if summary := answer.summary(clock()):
        console.print(summary, style="dim")
    return answer


@contextlib.contextmanager
def _without_echo(console: Console) -> Iterator[None]:
    """Turn off the terminal's echo: what is typed, and the `^C` of Ctrl-C, would move the cursor, and lines
    would then be drawn below themselves. What was typed is shown with the next prompt."""
    try:
        descriptor = console.file.fileno()
        before = termios.tcgetattr(descriptor)
        in_foreground = os.tcgetpgrp(descriptor) == os.getpgrp()
    except (OSError, termios.error):  # no terminal
        in_foreground = False
    if not in_foreground:  # a background job that changes the terminal would be suspended
        yield
        return
    mode = [*before]
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C until a drawing is complete, so that the screen knows where the cursor is."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Screen:
    """Screen that prints finished text once, and redraws the rest."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
        self._live.start()
        self._printed = 0
        self._drawn_at = float("-inf")
        self._folded = False

    def show(self, answer: Answer) -> None:
        now = self._clock()
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
            took = self._clock() - answer.began
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
    for line in _LINE.findall(text):
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
