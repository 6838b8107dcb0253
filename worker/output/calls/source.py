"""Incremental text source for tool-call readers, which are generators that yield when they need more text.

A reader requests what must come next and yields until that can be decided, so its result depends on the text
and not on how it was split into pieces. Text whose output has been emitted is *taken*; if the call breaks,
the text after that point remains text.

Special tokens appear in the text as signs (`worker.output.channels`), so a literal has two spellings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from worker.output.channels import Literals, signed

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A running reader: yields when it needs more text, returns its result, raises `BrokenError`."""

CLOSINGS = (
    *("</tool_call>", "</function>", "</invoke>", "</minimax:tool_call>", "</atem:invoke>"),
    *("</atem:function_calls>", "</longcat_tool_call>", "</tools>", "</tool_calls>", "</function_calls>"),
    *("<tool_call|>", "<end_function_call>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("</seed:tool_call>", "</TOOLCALL>", "<|/tool_call|>", "<|END_ACTION|>", "<｜tool▁calls▁end｜>"),
    *("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
)
"""What ends a call or a section in any format."""

_SPACES = re.compile(r"[ \t\r\n]*")
_SIGN = re.compile("[\ud800-\udfff]")


class BrokenError(Exception):
    """The text is not a call, or not the rest of one."""


class Spelling:
    """Spellings of literals in one model's text. One per model."""

    def __init__(self, signs: Mapping[str, str]) -> None:
        """`signs`: by the names of their special tokens."""
        self._signs = signs
        self.forms: Callable[[str], tuple[str, ...]] = functools.cache(self._forms)
        self.ends: Callable[[tuple[str, ...]], Literals[str]] = functools.cache(
            lambda literals: Literals({form: literal for literal in literals for form in self.forms(literal)})
        )

    def _forms(self, literal: str) -> tuple[str, ...]:
        form = signed(literal, self._signs)
        return (literal,) if form == literal else (form, literal)


class CallSource:
    """Buffer of the text behind a marker, with a read position."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._text = ""
        self._at = 0
        self._taken = 0
        self._ended_at = 0
        self.has_ended = False
        """Whether no more text comes."""
        self._is_whole = False
        self.has_answer_ended = False
        """Whether the model has ended its answer here, by itself."""

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._taken :] + text
        self._at -= self._taken
        self._ended_at -= self._taken
        self._taken = 0

    def end(self, *, is_whole: bool = False, has_answer_ended: bool = False) -> None:
        """Mark the end. `is_whole`: the text is complete, so a token at its end is complete too."""
        self.has_ended = True
        self._is_whole = is_whole
        self.has_answer_ended = has_answer_ended

    def rewind(self) -> None:
        """Read again from behind the taken text."""
        self._at = self._taken

    def take(self, *, but: int = 0) -> None:
        """Mark the text read so far as emitted, except its last `but` characters."""
        self._taken = self._at - but

    def left(self) -> str:
        """Return the text that was not taken."""
        return self._text[self._taken :]

    def more(self) -> Steps[None]:
        """Wait for more text. Raises `BrokenError` at the end."""
        if self.has_ended:
            raise BrokenError
        yield

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; empty at the end."""
        while self._at == len(self._text) and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def accept(self) -> str:
        """Consume and return the next character, which was peeked at."""
        self._at += 1
        return self._text[self._at - 1]

    def back(self) -> None:
        """Unread the literal that was read last."""
        self._at = self._ended_at

    def skip(self, *literals: str) -> Steps[str]:
        """Consume and return the first of `literals` that comes next; empty: none does."""
        for literal in literals:
            if (yield from self._skip(literal)):
                return literal
        return ""

    def _skip(self, literal: str) -> Steps[bool]:
        forms = self._spelling.forms(literal)
        while True:
            for form in forms:
                if self._text.startswith(form, self._at):
                    self._ended_at = self._at
                    self._at += len(form)
                    return True
            rest = self._text[self._at : self._at + len(literal)]
            if not any(form.startswith(rest) for form in forms) or (self.has_ended and not rest):
                return False
            if self._is_whole:
                return False
            yield from self.more()

    def expect(self, *literals: str) -> Steps[str]:
        """Consume and return one of `literals`. Raises `BrokenError` if none comes next."""
        found = yield from self.skip(*literals)
        if not found:
            raise BrokenError
        return found

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consume and return what `pattern` matches in the buffered text."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def run(self, pattern: re.Pattern[str], characters_max: int) -> Steps[str]:
        """Consume and return all that `pattern` matches, waiting until something else follows."""
        read = ""
        while (yield from self.peek()) and (more := self.match(pattern)):
            read += more
            if len(read) > characters_max:
                raise BrokenError
        if self._at == len(self._text) and not self._is_whole:
            raise BrokenError
        return read

    def spaces(self) -> Steps[str]:
        """Consume and return white space."""
        read = self.match(_SPACES)
        while (yield from self.peek()) and (more := self.match(_SPACES)):
            read += more
        return read

    def look(self, steps: Steps[T]) -> Steps[T]:
        """Return what `steps` read, consuming nothing."""
        read = self._at - self._taken
        try:
            return (yield from steps)
        finally:
            self._at = self._taken + read  # taken text may have been dropped from the buffer

    def ahead(self) -> Steps[str]:
        """Return the next character behind white space, consuming nothing; empty at the end."""
        return (yield from self.look(self.find()))

    def find(self, *literals: str, scraps: tuple[str, ...] = ()) -> Steps[str]:
        """Consume the first of `literals` that comes next behind white space and scraps, and return it. Else
        consume nothing, and return the next character; empty: the text ends, which is consumed.

        Scraps are `scraps`, and beginnings of `literals` that models break off and begin again.
        """
        read = self._at - self._taken
        while True:
            yield from self.spaces()
            try:
                found = yield from self.skip(*literals)
            except BrokenError:  # the text ends within one
                found = ""
            if found or not (character := (yield from self.peek())):
                return found
            if not (yield from self.skip(*scraps)) and not self._skip_beginning(literals):
                self._at = self._taken + read
                return character

    def _skip_beginning(self, literals: tuple[str, ...]) -> bool:
        forms = [form for literal in literals for form in self._spelling.forms(literal)]
        for length in range(max(map(len, forms), default=0), 0, -1):
            begun = self._text[self._at : self._at + length]
            if any(form.startswith(begun) for form in forms):
                is_scrap = len(begun) > 1 or _SIGN.match(begun) or self._at + 1 == len(self._text)
                self._at += len(begun) if is_scrap else 0
                return bool(is_scrap)
        return False

    def part(self, *literals: str) -> Steps[tuple[str, str]]:
        """Consume some text before the first of `literals`; return it, and the literal once reached."""
        ends = self._spelling.ends(literals)
        while True:
            found = ends.pattern.search(self._text, self._at)
            if found is not None:
                text = self._text[self._at : found.start()]
                self._ended_at, self._at = found.span()
                return text, ends.values[found[0]]
            rest = self._text[self._at :]
            if certain := len(rest) - ends.hold(rest):
                self._at += certain
                return rest[:certain], ""
            yield from self.more()

    def until(self, *literals: str, characters_max: int | None = None) -> Steps[tuple[str, str]]:
        """Consume all text before the first of `literals`; return it and the literal."""
        read = ""
        while True:
            text, end = yield from self.part(*literals)
            read += text
            if characters_max is not None and len(read) > characters_max:
                raise BrokenError
            if end:
                return read, end
