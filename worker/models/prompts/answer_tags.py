"""Tags around the content of an answer: plain text, which some families write behind a thought.

Other models write such tags because they were asked to: they are content unless the chat template has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.models.prompts.template import Template, attempt, template_of
from worker.models.prompts.wants import ANSWER, USER
from worker.output.channels import CONTENT, REASONING, Piece

_KNOWN = (
    ("<answer>", "</answer>"),  # Hunyuan
    ("<response>", "</response>"),  # Granite 3.3, ERNIE
)


def answer_tags_of(tokenizer: TokenizerWrapper) -> dict[str, str]:
    """Return the ends of the tags by their starts, of those that the chat template knows."""
    text = str(getattr(tokenizer, "chat_template", None) or "")
    ends = {start: end for start, end in _KNOWN if start in text}
    template = template_of(tokenizer) if ends else None
    return {start: end for start, end in ends.items() if template and _knows(template, start, end)}


def _knows(template: Template, start: str, end: str) -> bool:
    """Return whether a template writes the tags around answers, asks for them, or cuts them off. It may have
    them for other things, such as results of tools (MiniMax)."""
    thinking = {"enable_thinking": True, "thinking": True}
    tagged = attempt(template, [USER, ANSWER | {"content": f"{start}{ANSWER['content']}{end}"}])
    is_cut = ANSWER["content"] in tagged and start not in tagged
    return is_cut or start in attempt(template, [USER, ANSWER], options=thinking)


class AnswerTags:
    """Reader of one answer that takes the tags off its content."""

    def __init__(self, ends: Mapping[str, str]) -> None:
        """`ends`: the result of `answer_tags_of`."""
        self._ends = ends
        self._end = ""
        self._may_begin = bool(ends)
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether text is withheld that may become a tag."""
        return bool(self._held)

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that are certain, without tags."""
        said: list[Piece] = []
        for state, text in pieces:
            if state != CONTENT:
                said += self.rest()
                self._may_begin = self._may_begin or state == REASONING
            said.append((state, self._untagged(str(text)) if state == CONTENT else text))
        return said

    def rest(self) -> list[Piece]:
        """Return the withheld text."""
        held, self._held = self._held, ""
        return [(CONTENT, held)] if held else []

    def _untagged(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._may_begin:
            bare = text.lstrip()
            if any(start.startswith(bare) and start != bare for start in self._ends):
                self._held = text
                return ""
            start = next((start for start in self._ends if bare.startswith(start)), "")
            text = bare.removeprefix(start) if start else text
            self._may_begin, self._end = False, self._ends.get(start, "")
        before, found, behind = text.partition(self._end) if self._end else (text, "", "")
        if found:
            self._end = ""
        elif self._end:
            size = next(
                size for size in range(len(self._end) - 1, -1, -1) if before.endswith(self._end[:size])
            )
            before, self._held = before[: len(before) - size], before[len(before) - size :]
        return before + behind
