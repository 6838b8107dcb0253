"""The text of one possible call, read by generators that pause where it has not been generated yet.

A reader asks for what should stand next. Where that cannot be told yet, it yields, and goes on when there is
more; so what it finds is a function of the text, not of the pieces it came in. What has been given out for
good is *taken*: whatever turns out to be no call, it is the text behind that which stays text.

Special tokens stand in the text as signs (`worker.output.channels`), so a literal has two spellings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader on its way: yields where it needs more text, returns what it has read, raises `BrokenError`."""

_SPACES = re.compile(r"[ \t\r\n]*")


class BrokenError(Exception):
    """What stands here is no call, or none any more."""


class Spelling:
    """How literals are spelled in one model's text. One per model."""

    def __init__(self, signs: Mapping[str, str]) -> None:
        """`signs`: of special tokens, by their names."""
        self._signs = sorted(signs.items(), key=lambda item: -len(item[0]))
        self.forms: Callable[[str], tuple[str, ...]] = functools.cache(self._forms)
        self.ends: Callable[[tuple[str, ...]], Ends] = functools.cache(
            lambda literals: Ends({form: literal for literal in literals for form in self.forms(literal)})
        )

    def _forms(self, literal: str) -> tuple[str, ...]:
        signed = literal
        for name, sign in self._signs:
            signed = signed.replace(name, sign)
        return (literal,) if signed == literal else (signed, literal)


class Ends:
    """Literals of which the first one is sought."""

    def __init__(self, literals: Mapping[str, str]) -> None:
        """`literals`: each spelling, with what it spells."""
        self.literals = literals
        self.pattern = re.compile("|".join(map(re.escape, literals)))
        self._held_max = max(map(len, literals)) - 1

    def hold(self, text: str) -> int:
        """How many characters at the end of the text begin one of them."""
        for length in range(min(self._held_max, len(text)), 0, -1):
            if any(form.startswith(text[-length:]) for form in self.literals):
                return length
        return 0


class Source:
    """What has been said behind a marker."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._text = ""
        self._at = 0
        self._taken = 0
        self._ended_at = 0
        self._has_ended = False
        self._is_whole = False

    def feed(self, text: str) -> None:
        """More of it."""
        self._text = self._text[self._taken :] + text
        self._at -= self._taken
        self._taken = 0

    def end(self, *, is_whole: bool = False) -> None:
        """There is no more. `is_whole`: nothing was cut off, so what stands at the end ends there."""
        self._has_ended = True
        self._is_whole = is_whole

    def take(self, *, but: int = 0) -> None:
        """What was read is given out for good, but for so many characters."""
        self._taken = self._at - but

    def left(self) -> str:
        """What was not taken."""
        return self._text[self._taken :]

    def more(self) -> Steps[None]:
        """Wait for more. Raises `BrokenError` if there is none."""
        if self._has_ended:
            raise BrokenError
        yield

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text) and not self._has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def accept(self) -> str:
        """The character that was peeked at, read."""
        self._at += 1
        return self._text[self._at - 1]

    def back(self) -> None:
        """Unread the end of the part that was read last."""
        self._at = self._ended_at

    def skip(self, *literals: str) -> Steps[str]:
        """The first of these that stands here, read; empty if none does."""
        for literal in literals:
            if (yield from self._skip(literal)):
                return literal
        return ""

    def _skip(self, literal: str) -> Steps[bool]:
        forms = self._spelling.forms(literal)
        while True:
            for form in forms:
                if self._text.startswith(form, self._at):
                    self._at += len(form)
                    return True
            rest = self._text[self._at : self._at + len(literal)]
            if not any(form.startswith(rest) for form in forms) or (self._has_ended and not rest):
                return False
            if self._is_whole:
                return False
            yield from self.more()

    def expect(self, *literals: str) -> Steps[str]:
        """One of these must stand here, and is read."""
        found = yield from self.skip(*literals)
        if not found:
            raise BrokenError
        return found

    def match(self, pattern: re.Pattern[str]) -> str:
        """What fits of the text that is there already; read."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def run(self, pattern: re.Pattern[str], characters_max: int) -> Steps[str]:
        """All that fits, until something else follows."""
        read = ""
        while (yield from self.peek()) and (more := self.match(pattern)):
            read += more
            if len(read) > characters_max:
                raise BrokenError
        if self._at == len(self._text) and not self._is_whole:
            raise BrokenError
        return read

    def spaces(self) -> Steps[str]:
        """White space, read."""
        read = self.match(_SPACES)
        while (yield from self.peek()) and (more := self.match(_SPACES)):
            read += more
        return read

    def ahead(self) -> Steps[str]:
        """The next character behind white space, nothing of it read; empty at the end."""
        read = self._at - self._taken
        yield from self.spaces()
        character = yield from self.peek()
        self._at = self._taken + read  # text that is taken already may be gone by now
        return character

    def part(self, *literals: str) -> Steps[tuple[str, str]]:
        """More of the text before the first of these, and that one, read, where it is met."""
        ends = self._spelling.ends(literals)
        while True:
            found = ends.pattern.search(self._text, self._at)
            if found is not None:
                text = self._text[self._at : found.start()]
                self._ended_at, self._at = found.span()
                return text, ends.literals[found[0]]
            rest = self._text[self._at :]
            if certain := len(rest) - ends.hold(rest):
                self._at += certain
                return rest[:certain], ""
            yield from self.more()

    def until(self, *literals: str, characters_max: int | None = None) -> Steps[tuple[str, str]]:
        """All of the text before the first of these, and that one, read."""
        read = ""
        while True:
            text, end = yield from self.part(*literals)
            read += text
            if characters_max is not None and len(read) > characters_max:
                raise BrokenError
            if end:
                return read, end
