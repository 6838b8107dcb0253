"""`echo` of completions: the prompt's text before the answer and, with logprobs, its tokens.

Invariant: the pieces of text, joined, are exactly the prompt as sent. The offsets of tokens that are not in
the text (a BOS that the tokenizer adds, normalized characters) are approximate.
"""

from __future__ import annotations

import codecs
from typing import Any

from broker.dialects.logprobs import legacy_lists
from protocol.messages import Accepted, PromptLogprobs
from protocol.types import PromptToken

SKIPPED_CHARACTERS_MAX = 8
"""How far ahead a token is searched for in the text if it is not at the expected offset."""


class Echo:
    """Echo of one choice's prompt. Each answer has its own, which is read once from the beginning."""

    def __init__(self, text: str | None, *, scored: bool) -> None:
        """`text`: None if the prompt was sent as tokens; the worker then reports the text. `scored`: whether
        tokens with logprobs were requested."""
        self._text = text
        self._scored = scored
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._due = 0
        self._tokens: list[PromptToken] = []
        self._given = 0
        self._at = 0

    @property
    def characters(self) -> int:
        """Length of the whole text, once the request is accepted."""
        return len(self._text or "")

    def add_prompt(self, item: Accepted | PromptLogprobs) -> None:
        """Accept the prompt's text, or the logprobs of more of its tokens."""
        if isinstance(item, PromptLogprobs):
            self._tokens += item.tokens
            return
        self._due = item.prompt_tokens
        if self._text is None:
            self._text = item.prompt

    def take(self) -> tuple[str, dict[str, Any] | None]:
        """Return the new text of the echo, and its `choices[].logprobs`."""
        text = self._text or ""
        if not self._scored:
            given, self._given = self._given, len(text)
            return text[given:], None
        tokens, self._tokens = self._tokens, []
        lists = legacy_lists(tokens, [self._place(text, token.bytes) for token in tokens])
        self._due -= len(tokens)
        given, self._given = self._given, self._at if self._due > 0 else len(text)
        return text[given : self._given], lists if tokens else None

    def _place(self, text: str, spelled: bytes) -> int:
        """Return the offset of the next token in the text, in characters."""
        piece = self._decoder.decode(spelled)
        if self._at == 0 and piece[:1] == " " and not text.startswith(" "):
            piece = piece[1:]  # many tokenizers prepend a space to every text
        begin = text.find(piece, self._at, self._at + len(piece) + SKIPPED_CHARACTERS_MAX)
        if begin < 0:
            return self._at
        self._at = begin + len(piece)
        return begin
