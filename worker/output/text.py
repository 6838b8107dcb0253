"""Detokenizer of one request: incremental decoding, and stop strings.

Invariant: the emitted text, joined, is the text of the whole token sequence up to the first stop string.
Text that a later token could still change is therefore withheld.

`tokenizers.decoders.DecodeStream` does not guarantee that: text that ends in a genuine U+FFFD is never
emitted, a byte-fallback character is emitted and then retracted when its run of bytes turns out invalid
("Invalid prefix encountered"), and every token of a run without text decodes the whole run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, pre_tokenizers

from worker.values import OutputDelta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
WINDOW_TOKENS_MAX = 16
"""Number of unsettled tokens beyond which the window is cut where the text before is certain."""
_CHARACTER_TOKENS_MAX = 4
"""Maximum tokens of a character: it has at most four bytes, and a token with text at least one."""
_BEFORE = "a"
"""Prefix of a piece to be decoded, because many decoders drop a leading space."""


class Vocabulary:
    """Tokenizer adapter for decoding. One per model, used by the model thread only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: used by this thread only. Its clean-up of spaces is off: it alters emitted text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.decode: Callable[[Sequence[int]], str]
        self._is_known: Callable[[int], bool]
        self._piece: Callable[[int], str | None]
        self._join: Callable[[list[str]], str]
        self._byte_of: Mapping[str, int]
        if backend is not None:
            self.decode = backend.decode
            self._is_known = lambda token: backend.id_to_token(token) is not None
            added = backend.get_added_tokens_decoder()
            self.special = frozenset(token for token, entry in added.items() if entry.special)
            to_token = backend.token_to_id
            self._piece = backend.id_to_token
            self._join = " ".join if backend.decoder is None else backend.decoder.decode
            self._byte_of = _byte_level_characters(backend)
        else:
            self.decode = lambda tokens: str(
                tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
            self._is_known = range(len(tokenizer)).__contains__
            self.special = frozenset(tokenizer.all_special_ids)
            to_token = tokenizer.get_vocab().get
            piece_of: Any = tokenizer.convert_ids_to_tokens  # one piece for one token, a list for a list
            self._piece = piece_of
            self._join = tokenizer.convert_tokens_to_string
            self._byte_of = getattr(tokenizer, "byte_decoder", {})
        named = (to_token(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_tokens = frozenset(token for token in named if token is not None)
        # The cache is bounded by the number of tokens.
        self.spell = functools.cache(self._spell)

    def has_text(self, token: int) -> bool:
        """Whether a token has text: not special tokens, nor ids beyond the tokenizer's vocabulary."""
        return token not in self.special and self._is_known(token)

    def _spell(self, token: int) -> bytes:
        """Return the bytes of a token within a text; joined, they are the bytes of the text.

        A special token yields its name, and an id that the tokenizer does not know yields nothing. The
        leading space that some decoders drop is included.
        """
        piece = self._piece(token) if self._is_known(token) else None
        if piece is None:
            return b""
        if token in self.special:
            return piece.encode()
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        if token in self.byte_tokens:
            return bytes.fromhex(piece[3:5])
        return self._join([_BEFORE, piece]).removeprefix(_BEFORE).encode()


def _byte_level_characters(backend: Tokenizer) -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary; empty for other vocabularies.

    GPT-2's scheme: 188 bytes map to the characters of the same number, the rest in order from U+0100.
    """
    if backend.decoder is None or b'"ByteLevel"' not in backend.decoder.__getstate__():
        return {}
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = [ord(character) for character in characters if ord(character) < 256]
    others = sorted({*range(256)} - {*themselves})
    return dict(zip(characters, [*themselves, *others], strict=True))


class TextStream:
    """Incremental detokenizer. The pieces and `rest`, joined, equal `vocabulary.decode` of all tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Tokens whose text may still change, after `_context` earlier ones: many decoders treat the first
        # token of a text differently. `_given`: length of the window's text that was emitted.
        self._window: list[int] = []
        self._context = 0
        self._given = 0

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        if not self._vocabulary.has_text(token):
            return ""
        self._window.append(token)
        if token in self._vocabulary.byte_tokens:
            return ""  # one invalid byte turns its whole run into U+FFFD, so only the run's end settles it
        text = self._vocabulary.decode(self._window)
        settled = text.rstrip(REPLACEMENT)
        piece = settled[self._given :]
        if len(settled) < len(text):
            self._given = max(self._given, len(settled))
            return piece + (self._cut(text) if len(self._window) > WINDOW_TOKENS_MAX else "")
        if piece:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._vocabulary.decode(self._window))
        return piece

    def settle(self) -> str:
        """Return the withheld text; what follows is decoded independently of it."""
        text = self._vocabulary.decode(self._window)
        piece = text[self._given :]
        if text.endswith(REPLACEMENT) or not self._vocabulary.byte_tokens.isdisjoint(self._window[-1:]):
            # These bytes must not merge with later ones into one character.
            self._window, self._context, self._given = [], 0, 0
        elif piece:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._vocabulary.decode(self._window))
        return piece

    def rest(self) -> str:
        """Return the withheld text at the end of the answer. Call once."""
        return self._vocabulary.decode(self._window)[self._given :]

    def _cut(self, text: str) -> str:
        """Emit the head of a long run of U+FFFD: a run of invalid UTF-8 may never end by itself.

        A cut lies between characters if both halves decode to the whole and at least one character's worth of
        tokens follows. Among `_CHARACTER_TOKENS_MAX` neighbouring positions there is such a cut.
        """
        last = len(self._window) - _CHARACTER_TOKENS_MAX
        for place in range(last, last - _CHARACTER_TOKENS_MAX, -1):
            head = self._vocabulary.decode(self._window[:place])
            if head + self._vocabulary.decode(self._window[place:]) == text:
                piece = head[self._given :]
                self._given = max(0, self._given - len(head))
                self._window = self._window[place:]
                self._context = 0
                return piece
        return ""


class StopMatcher:
    """Streaming search for the stop string that is completed first.

    Of those completed at the same character the longest wins. The result does not depend on how the text is
    split into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held_max = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.found = ""
        """The stop string that was matched."""

    @property
    def matched(self) -> bool:
        return bool(self.found)

    def push(self, text: str) -> str:
        """Add text; return the part that is certainly before any stop string."""
        if self.matched or not self._stops or not text:
            return "" if self.matched else text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.found = min(found)
            self._held = ""
            return text[:start]
        certain = len(text) - self._hold(text)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Return the text withheld as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop string."""
        for length in range(min(self._held_max, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextProcessor:
    """`OutputProcessor` of raw text: all of it is content."""

    reasoning_tokens = 0
    has_called = False

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        """`stop`: the request's stop strings."""
        self.stopped = False
        self._vocabulary = vocabulary
        self._stream = TextStream(vocabulary)
        self._matcher = StopMatcher(stop)

    @property
    def stop_string(self) -> str:
        return self._matcher.found

    def push(self, token: int) -> OutputDelta:
        return OutputDelta("" if self.stopped else self._match(self._stream.push(token)))

    def flush(self, *, has_ended: bool = False) -> OutputDelta:
        """Return the withheld text. A stop string may be found only here. Call once."""
        return OutputDelta("" if self.stopped else self._match(self._stream.rest()) + self._matcher.rest())

    def spell(self, token: int) -> bytes:
        return self._vocabulary.spell(token)

    def _match(self, text: str) -> str:
        certain = self._matcher.push(text)
        self.stopped = self._matcher.matched
        return certain
