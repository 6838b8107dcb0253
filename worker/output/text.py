"""One request's way from tokens to text: decoding as it goes, and the stop strings.

What must hold: all that is given out, joined, is the text of the whole token sequence up to the first stop
string. So nothing is given out that a later token could still change.

`tokenizers.decoders.DecodeStream` does not keep that promise: text that ends in a genuine U+FFFD is never
given out, a byte-fallback character is given out and then taken back when its run of bytes turns out invalid
("Invalid prefix encountered"), and every token of a run without text decodes the whole run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, pre_tokenizers

from worker.contract import Growth

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
WINDOW_TOKENS_MAX = 16
"""Unsettled tokens beyond which a place is sought where the text before is settled whatever follows."""
_CHARACTER_TOKENS_MAX = 4
"""A character has at most four bytes, and a token that has text at least one."""
_BEFORE = "a"
"""Stands before a piece to be decoded, since many decoders drop the space that a text begins with."""


class Vocabulary:
    """What decoding needs of a tokenizer. One per model, used by the model thread only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: of this thread alone. Its clean-up of spaces is left out: it alters what was sent."""
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
        # One entry for each of the model's tokens at most.
        self.spell = functools.cache(self._spell)

    def has_text(self, token: int) -> bool:
        """False for special tokens, and for ids between the tokenizer's size and the model's."""
        return token not in self.special and self._is_known(token)

    def _spell(self, token: int) -> bytes:
        """The bytes a token stands for inside a text: joined, they are those of the text.

        A special token, which has no text, has its name. The space that some decoders drop where a text
        begins is spelled. Nothing is spelled by an id that the tokenizer does not know.
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
    """In byte-level vocabularies: the characters that stand for bytes. Otherwise none.

    GPT-2's scheme: 188 bytes are the characters of the same number, the rest follow in order from U+0100.
    """
    if backend.decoder is None or b'"ByteLevel"' not in backend.decoder.__getstate__():
        return {}
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = [ord(character) for character in characters if ord(character) < 256]
    others = sorted({*range(256)} - {*themselves})
    return dict(zip(characters, [*themselves, *others], strict=True))


class TextStream:
    """Tokens to text, as they come. Pieces and rest, joined, are `vocabulary.decode` of all tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # The tokens whose text may still change, after the ones before them: many decoders treat the first
        # token of a text differently. `_given` is that part of the window's text which has been given out.
        self._window: list[int] = []
        self._context = 0
        self._given = 0

    def push(self, token: int) -> str:
        """The text that is settled by this token."""
        if not self._vocabulary.has_text(token):
            return ""
        self._window.append(token)
        if token in self._vocabulary.byte_tokens:
            return ""  # one invalid byte turns its whole run into U+FFFD, so a run is settled by its end
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
        """What no later token can change, since what follows stands apart from it."""
        text = self._vocabulary.decode(self._window)
        piece = text[self._given :]
        if text.endswith(REPLACEMENT) or not self._vocabulary.byte_tokens.isdisjoint(self._window[-1:]):
            # Bytes that must not become one character with those that follow.
            self._window, self._context, self._given = [], 0, 0
        elif piece:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._given = len(self._vocabulary.decode(self._window))
        return piece

    def rest(self) -> str:
        """What no further token can change, for there is none. Call once."""
        return self._vocabulary.decode(self._window)[self._given :]

    def _cut(self, text: str) -> str:
        """Give out the head of a long run of U+FFFD: what is not UTF-8 never ends by itself.

        Two halves that decode to the whole are cut between characters, if at least a character's worth of
        tokens follows the cut; one of so many neighbouring places is such a cut.
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
    """Finds the first stop string in text that comes in pieces: the one that is complete first.

    Of those complete at the same character the longest counts. Where the pieces begin and end plays no part.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held_max = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.found = ""
        """The stop string that was found."""

    @property
    def matched(self) -> bool:
        return bool(self.found)

    def push(self, text: str) -> str:
        """The text that is certain to lie before any stop string."""
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
        """What was held back as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str) -> int:
        """How many characters at the end of the text begin some stop string."""
        for length in range(min(self._held_max, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextPipeline:
    """`contract.Pipeline` of raw text: all of it is content."""

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
        """See `contract.Pipeline`."""
        return self._matcher.found

    def push(self, token: int) -> Growth:
        """See `contract.Pipeline`."""
        return Growth("" if self.stopped else self._match(self._stream.push(token)))

    def flush(self) -> Growth:
        """See `contract.Pipeline`. A stop string may show itself only here. Call once."""
        return Growth("" if self.stopped else self._match(self._stream.rest()) + self._matcher.rest())

    def spell(self, token: int) -> bytes:
        """See `contract.Pipeline`."""
        return self._vocabulary.spell(token)

    def _match(self, text: str) -> str:
        certain = self._matcher.push(text)
        self.stopped = self._matcher.matched
        return certain
