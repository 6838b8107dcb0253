"""Prefix-cache boundaries: positions in a prompt up to which later prompts will likely have the same tokens.

They are found with the chat template: possible continuations of the conversation, and other conversations
with the same beginning, are rendered and compared with this prompt. Nothing simpler works, because templates
rewrite earlier turns: Qwen3 drops their reasoning, Mistral moves the tools to the last question. A boundary
that no later prompt shares costs a snapshot of the model's state, never a wrong answer.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from worker.common_prefix import common_prefix_length
from worker.values import MessageEnd

Messages = Sequence[Mapping[str, Any]]

GAP_MIN = 16
"""Minimum distance in tokens between boundaries, and from the start of the prompt. Of two closer ones the
earlier is used: each boundary costs a snapshot and another pass through the model."""

_AHEAD = 64
"""Characters after the shared part that are tokenized too: they may decide how its end is tokenized."""

# With this behind it a line break becomes a different token, even if the template strips line breaks.
_BLANK = "\n\n  \n"
_ANSWER = {"role": "assistant", "content": _BLANK + "x"}
_QUESTION = {"role": "user", "content": "x"}
_CALL_ID = "boundary0"  # Mistral's templates require nine letters or digits
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": "x", "arguments": {"x": "x"}},
}
_RESULT = {"role": "tool", "name": "x", "tool_call_id": _CALL_ID, "content": "x"}


def find_boundaries(
    prompt: RenderedPrompt, messages: Messages, render: Callable[[Messages], str], *, with_tools: bool
) -> tuple[int, ...]:
    """Return at most four positions in the prompt's tokens: ascending, `GAP_MIN` apart, before its end.

    `render`: renders messages like the prompt, with the same tools and arguments; returns an empty string if
    the template refuses. `with_tools`: the request has tools, so the model may call one.
    """
    last = len(prompt.tokens) - 1

    def shared_with(*conversation: Mapping[str, Any]) -> int:
        return min(prompt.shared_with(render(conversation)), last)

    # The gateway merges consecutive answers, so an answer at the end may still grow.
    turns = messages[: len(messages) - _run(reversed(messages), "assistant")]
    newest = turns[-1].get("role") if turns else None
    starts = {_run(messages, "system")}  # another conversation
    if newest == "user":  # a retry with another question; earlier questions got their boundaries before
        starts.add(len(turns) - 1)
    found = [shared_with(*messages[:start], _unlike(messages[start : start + 1])) for start in starts]
    found.append(shared_with(*turns, _ANSWER, _QUESTION))
    if (with_tools or newest == "tool") and last - found[-1] >= GAP_MIN:
        found.append(shared_with(*turns, _ANSWER | {"tool_calls": [_CALL]}, _RESULT))
    return _spaced(sorted(found))


def _run(messages: Iterable[Mapping[str, Any]], role: str) -> int:
    """Count the leading messages of `role`."""
    return len(list(takewhile(lambda message: message.get("role") == role, messages)))


def _spaced(positions: Sequence[int]) -> tuple[int, ...]:
    kept = [0]
    for position in positions:
        if position - kept[-1] >= GAP_MIN:
            kept.append(position)
    return tuple(kept[1:])


def _unlike(messages: Messages) -> Mapping[str, Any]:
    """Return a user message that differs from the first of `messages` in its first character, trimmed or not.

    Exactly one of the two merges with a line break before it, so a token longer than the break is not shared.
    """
    content = messages[0].get("content") if messages else None
    if isinstance(content, list) and content:  # an image shares nothing with text
        content = content[0].get("text")
    text = content if isinstance(content, str) else ""
    word = "y" if text.lstrip().startswith("x") else "x"
    return {"role": "user", "content": word if text.startswith("\n") else _BLANK + word}


def _pieces(message: Mapping[str, Any]) -> list[str]:
    """Return what a template writes of a message: its texts and the names of its calls."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return [text.strip() for text in (*texts, *calls) if text.strip()]


class RenderedPrompt:
    """A rendered conversation with its tokens, for comparison with other renderings.

    Only the end of another rendering is tokenized, from the last added token (`<|im_start|>`) in the shared
    text: nothing before an added token affects how it and the text behind it are tokenized.
    """

    def __init__(
        self,
        text: str,
        tokens: Sequence[int],
        added: Mapping[int, str],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`added`: the text of each added token. `encode`: made `tokens` from `text`."""
        self.tokens = list(tokens)
        self._text = text
        self._encode = encode
        self._places = self._find_places(added)

    def shared_with(self, other: str) -> int:
        """Return the number of leading tokens that the prompt shares with `other`."""
        end = common_prefix_length(self._text, other)
        start, index = self._split(end)
        try:
            tokens = list(self._encode(other[start : end + _AHEAD])) if other else []
        except (TypeError, ValueError):  # text that cannot be tokenized never begins a prompt
            return 0
        return index + common_prefix_length(tokens, self.tokens, index)

    def message_ends(self, messages: Messages) -> tuple[MessageEnd, ...]:
        """Return the ends of the messages before the last answer: the added token behind the text of each.

        One whose text is not found, because the template changes it, ends with the next one.
        """
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        offsets, indices = self._marks()
        at, found = 0, list[int | None]()
        for message in messages[: max(answers, default=0)]:
            place, is_found = self._behind(message, at)
            at, mark = place, bisect.bisect_left(offsets, place)
            found.append(indices[mark] if is_found and mark < len(indices) else None)
        ends, end = list[MessageEnd](), len(self.tokens)
        for message, position in zip(reversed(messages[: len(found)]), reversed(found), strict=True):
            end = end if position is None else position
            ends.append(MessageEnd(end, str(message.get("role"))))
        return tuple(reversed(ends))

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return the offsets in the text and the indices of added tokens, in order."""
        marks = sorted(
            (found.start(), index)
            for mark, indices in self._places.items()
            for found, index in zip(re.finditer(re.escape(mark), self._text), indices, strict=True)
        )
        return [offset for offset, _ in marks], [index for _, index in marks]

    def _behind(self, message: Mapping[str, Any], start: int) -> tuple[int, bool]:
        """Return the offset behind a message's texts and names of calls, and whether all were found."""
        is_found = False
        for piece in _pieces(message):
            written = (piece, json.dumps(piece, ensure_ascii=False)[1:-1])
            places = [(self._text.find(form, start), len(form)) for form in written]
            place, size = min((each for each in places if each[0] >= 0), default=(-1, 0))
            if place < 0:
                return start, False
            start, is_found = place + size, True
        return start, is_found

    def _find_places(self, added: Mapping[int, str]) -> dict[str, list[int]]:
        """Return the indices of each added token that occurs in the prompt exactly as often as its text."""
        indices = [index for index, token in enumerate(self.tokens) if token in added]
        places = defaultdict[str, list[int]](list)
        for index in indices:
            places[added[self.tokens[index]]].append(index)
        return {mark: found for mark, found in places.items() if self._text.count(mark) == len(found)}

    def _split(self, end: int) -> tuple[int, int]:
        """Return the offset in the text and the token index of the last added token in `text[:end]`."""
        start, mark = max(((self._text.rfind(mark, 0, end), mark) for mark in self._places), default=(-1, ""))
        return (start, self._places[mark][self._text.count(mark, 0, start)]) if start >= 0 else (0, 0)
