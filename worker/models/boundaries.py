"""Positions in a prompt up to which later prompts will have the same tokens.

They are found by asking the chat template: the conversation is rendered as it may go on, or as another may
begin, and compared with the prompt at hand. Nothing less tells, for templates rewrite what they have rendered
before: Qwen3 drops the thoughts of earlier turns, Mistral moves the tools to the last question. A boundary
that no later prompt keeps to costs a snapshot of the model's state, never an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

Messages = Sequence[Mapping[str, Any]]

GAP_MIN = 16
"""Tokens. Of two boundaries nearer to each other than this the earlier does for both, and nearer to the start
there is none: each is another pass through the model as well as a snapshot."""

_AHEAD = 64
"""Characters of another rendering, after what it shares, that may decide how the shared end is cut."""

# A line break before this becomes another token than it is alone, even where the template strips line breaks.
_BLANK = "\n\n  \n"
_ANSWER = {"role": "assistant", "content": _BLANK + "x"}
_QUESTION = {"role": "user", "content": "x"}
_CALL_ID = "boundary0"  # nine letters or digits, as Mistral wants them
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": "x", "arguments": {"x": "x"}},
}
_RESULT = {"role": "tool", "name": "x", "tool_call_id": _CALL_ID, "content": "x"}


def find_boundaries(
    prompt: Prompt, messages: Messages, render: Callable[[Messages], str], *, with_tools: bool
) -> tuple[int, ...]:
    """At most four positions in the prompt's tokens, ascending, `GAP_MIN` apart, the end not among them.

    `render`: as the prompt was rendered from `messages`, with the same tools and arguments; empty where the
    template refuses. `with_tools`: the request has tools, so the model may call one.
    """
    last = len(prompt.tokens) - 1

    def shared_with(*conversation: Mapping[str, Any]) -> int:
        return min(prompt.shared_with(render(conversation)), last)

    # The gateway joins an answer to the answer before it, so one at the end may grow.
    turns = messages[: len(messages) - _run(reversed(messages), "assistant")]
    newest = turns[-1].get("role") if turns else None
    starts = {_run(messages, "system")}  # another conversation
    if newest == "user":  # the question asked anew; an earlier one had its boundary when it was the newest
        starts.add(len(turns) - 1)
    found = [shared_with(*messages[:start], _unlike(messages[start : start + 1])) for start in starts]
    found.append(shared_with(*turns, _ANSWER, _QUESTION))
    if (with_tools or newest == "tool") and last - found[-1] >= GAP_MIN:
        found.append(shared_with(*turns, _ANSWER | {"tool_calls": [_CALL]}, _RESULT))
    return _spaced(sorted(found))


def _run(messages: Iterable[Mapping[str, Any]], role: str) -> int:
    """How many messages in a row are of `role`, from the first on."""
    return len(list(takewhile(lambda message: message.get("role") == role, messages)))


def _spaced(positions: Sequence[int]) -> tuple[int, ...]:
    kept = [0]
    for position in positions:
        if position - kept[-1] >= GAP_MIN:
            kept.append(position)
    return tuple(kept[1:])


def _unlike(messages: Messages) -> Mapping[str, Any]:
    """A question that parts from the first of `messages` at the first character, trimmed or not. Exactly one
    of the two joins a line break before it, so a token that may hold more than the break is not shared."""
    content = messages[0].get("content") if messages else None
    if isinstance(content, list) and content:  # of an image, nothing is shared with a text
        content = content[0].get("text")
    text = content if isinstance(content, str) else ""
    word = "y" if text.lstrip().startswith("x") else "x"
    return {"role": "user", "content": word if text.startswith("\n") else _BLANK + word}


class Prompt:
    """A rendered conversation and its tokens, to be compared with other renderings.

    Only the end of another rendering is tokenized, from the last added token (`<|im_start|>`) in the text
    that the two share: nothing before an added token decides how it and what follows are cut.
    """

    def __init__(
        self,
        text: str,
        tokens: Sequence[int],
        added: Mapping[int, str],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`added`: the text of each added token. `encode`: how `tokens` were made of `text`."""
        self.tokens = list(tokens)
        self._text = text
        self._encode = encode
        self._places = self._find_places(added)

    def shared_with(self, other: str) -> int:
        """How many tokens at the beginning of the prompt `other` begins with as well."""
        end = _common(self._text, other)
        start, index = self._split(end)
        try:
            tokens = list(self._encode(other[start : end + _AHEAD])) if other else []
        except (TypeError, ValueError):  # text that cannot be tokenized is never the beginning of a prompt
            return 0
        return index + _common(self.tokens[index : index + len(tokens)], tokens)

    def _find_places(self, added: Mapping[int, str]) -> dict[str, list[int]]:
        """The indices of the added tokens that stand in the prompt exactly as often as their text does."""
        indices = [index for index, token in enumerate(self.tokens) if token in added]
        places = defaultdict[str, list[int]](list)
        for index in indices:
            places[added[self.tokens[index]]].append(index)
        return {mark: found for mark, found in places.items() if self._text.count(mark) == len(found)}

    def _split(self, end: int) -> tuple[int, int]:
        """The last added token in `text[:end]`: where it begins in the text, and its index."""
        start, mark = max(((self._text.rfind(mark, 0, end), mark) for mark in self._places), default=(-1, ""))
        return (start, self._places[mark][self._text.count(mark, 0, start)]) if start >= 0 else (0, 0)


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the longest common beginning of two strings or two lists."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
