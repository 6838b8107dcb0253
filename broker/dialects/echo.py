"""A prompt that is said back before its answer: its text, and with log-probabilities its tokens.

What must hold: the pieces of text, joined, are the prompt as it was sent, letter by letter. Of tokens that
are not in the text (a beginning that the tokenizer adds, letters that it writes otherwise) the places are as
near as can be said.
"""

from __future__ import annotations

import codecs
from typing import Any

from broker.dialects.logprobs import legacy_lists
from protocol.messages import Accepted, Scored
from protocol.parts import PromptToken

SKIPPED_CHARACTERS_MAX = 8
"""So far ahead a token is looked for that is not where it should be."""


class Echo:
    """The prompt of one choice. One for each answer: it is read once, from its beginning."""

    def __init__(self, text: str | None, *, scored: bool) -> None:
        """`text`: None where the prompt came as tokens: then its worker says it. `scored`: whether its tokens
        are asked for, with their log-probabilities."""
        self._text = text
        self._scored = scored
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._due = 0
        self._heard: list[PromptToken] = []
        self._given = 0
        self._at = 0

    @property
    def characters(self) -> int:
        """Of the whole text, once the request is accepted."""
        return len(self._text or "")

    def hear(self, item: Accepted | Scored) -> None:
        """The request is accepted, or more of its tokens are known."""
        if isinstance(item, Scored):
            self._heard += item.tokens
            return
        self._due = item.prompt_tokens
        if self._text is None:
            self._text = item.prompt

    def take(self) -> tuple[str, dict[str, Any] | None]:
        """What can be said and has not been: text, and `choices[].logprobs` of it."""
        text = self._text or ""
        if not self._scored:
            given, self._given = self._given, len(text)
            return text[given:], None
        tokens, self._heard = self._heard, []
        lists = legacy_lists(tokens, [self._place(text, token.bytes) for token in tokens])
        self._due -= len(tokens)
        given, self._given = self._given, self._at if self._due > 0 else len(text)
        return text[given : self._given], lists if tokens else None

    def _place(self, text: str, spelled: bytes) -> int:
        """Where in the text the next token begins, in characters."""
        piece = self._decoder.decode(spelled)
        if self._at == 0 and piece[:1] == " " and not text.startswith(" "):
            piece = piece[1:]  # many tokenizers put one before every text
        begin = text.find(piece, self._at, self._at + len(piece) + SKIPPED_CHARACTERS_MAX)
        if begin < 0:
            return self._at
        self._at = begin + len(piece)
        return begin
