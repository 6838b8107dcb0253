"""Random answers from the tokens that a guide allows, without a model; and vocabularies to draw them from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import Tokenizer

from tests.models.fixtures import model_folder
from tests.models.tokenizer import ADDED_TOKENS, token_bytes
from worker.grammars.compiler import Compiler
from worker.grammars.guide import AnswerGrammar, Markup
from worker.grammars.tokenizer import GrammarTokenizer
from worker.values import Grammar, Guide

TOKENS_MAX = 500
HURRIED_AFTER = 100
"""Number of tokens after which an answer is steered to its end."""
WIDE = 151_936
_CLOSING = (b'"', b"}", b"]", b"<", b"\n")


@dataclass(frozen=True)
class Words:
    """A vocabulary. `pieces`: the bytes of each token; for special tokens, their names."""

    pieces: tuple[bytes, ...]
    ends: tuple[int, ...]
    lexicon: GrammarTokenizer
    compiler: Compiler

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text that a client would get; raises if it is not valid UTF-8."""
        return b"".join(self.pieces[token] for token in tokens if token not in self.lexicon.special).decode()

    def spell_out(self, text: str) -> list[int]:
        """Encode `text` as one-byte tokens, and special tokens by their names."""
        names = sorted(self.lexicon.names, key=len, reverse=True)
        tokens, rest = [], text
        while rest:
            name = next((name for name in names if rest.startswith(name)), None)
            if name is not None:
                tokens.append(self.lexicon.names[name])
                rest = rest[len(name) :]
                continue
            tokens += [self.pieces.index(bytes([byte])) for byte in rest[0].encode()]
            rest = rest[1:]
        return tokens

    def grammar(self, lark: str) -> AnswerGrammar:
        return AnswerGrammar((self.compiler.compile(lark),), self.lexicon, Markup({}, self.lexicon))


def words_of(pieces: Sequence[bytes], names: dict[int, str], ends: Sequence[int]) -> Words:
    lexicon = GrammarTokenizer(pieces.__getitem__, len(pieces), names, ends)
    return Words(tuple(pieces), tuple(ends), lexicon, Compiler(lexicon))


@cache
def small() -> Words:
    """Return the test tokenizer's vocabulary: byte-level, 2000 tokens, followed by ids without tokens."""
    tokenizer = Tokenizer.from_file(str(model_folder("dense") / "tokenizer.json"))
    pieces = token_bytes(tokenizer)
    ids = {name: _id(tokenizer, name) for name in ADDED_TOKENS}
    names = {id: name for name, id in ids.items()}
    return words_of([*pieces, *[b""] * 48], names, [ids["<|im_end|>"]])


def _id(tokenizer: Tokenizer, name: str) -> int:
    id = tokenizer.token_to_id(name)
    assert id is not None
    return id


@cache
def wide() -> Words:
    """Return a vocabulary as large as Qwen's: bytes, and combinations of words, numbers and punctuation."""
    starts = [b"", b" ", b'"', b"\n", b"{", b'{"', b', "', b": ", b'": "', b"[", b"\n  ", b"'"]
    letters = [bytes([byte]) for byte in range(ord("a"), ord("z") + 1)]
    middles = [b"".join(part) for count in (1, 2, 3) for part in itertools.product(letters, repeat=count)]
    middles += [str(number).encode() for number in range(1000)] + ["é".encode(), "日本".encode(), b"\xe6\x97"]
    known = dict.fromkeys([bytes([byte]) for byte in range(256)])
    known |= dict.fromkeys(start + middle for start in starts for middle in middles)
    special = ["<|endoftext|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    pieces = [*itertools.islice(known, WIDE - len(special) - 20), *(name.encode() for name in special)]
    names = {len(pieces) - len(special) + place: name for place, name in enumerate(special)}
    ends = [token for token, name in names.items() if name.startswith("<|")]
    return words_of([*pieces, *[b""] * (WIDE - len(pieces))], names, ends)


class Mask:
    """The tokens that a guide allows."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._bytes = bytearray(4 * ((width + 31) // 32))

    def of(self, guide: Guide) -> bytes | None:
        """Return the mask; None: every token is allowed."""
        self._bytes[:] = b"\xff" * len(self._bytes)  # whatever its previous contents
        return bytes(self._bytes) if guide.fill(memoryview(self._bytes)) else None

    def allowed(self, guide: Guide) -> np.ndarray | None:
        mask = self.of(guide)
        if mask is None:
            return None
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        assert not bits[self._width :].any(), "the mask allows a token beyond the vocabulary"
        return np.nonzero(bits)[0]


Free = Callable[[random.Random], int]
"""Draws a token where every token is allowed, with or without ends."""


def draw(
    words: Words, grammar: Grammar, seed: int, free: Free | None = None, limit: int = TOKENS_MAX
) -> tuple[list[int], bool]:
    """Return a random answer without its end token, and whether it reached the end."""
    rng, guide, mask = random.Random(seed), grammar.open(()), Mask(words.lexicon.width)
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = mask.allowed(guide)
        if allowed is None or allowed.size == words.lexicon.width - len(words.ends):
            assert free is not None, "this grammar never allows every token"
            token = free(rng)
            if allowed is not None and token in words.ends:
                continue
        else:
            assert allowed.size, "at least one token must be allowed"
            token = _drawn(words, allowed, rng, is_hurried=len(tokens) > HURRIED_AFTER)
        if token in words.ends:
            return tokens, True
        guide.accept_token(token)
        tokens.append(token)
    return tokens, False


def _drawn(words: Words, allowed: np.ndarray, rng: random.Random, *, is_hurried: bool) -> int:
    ends = [end for end in words.ends if end in allowed]
    if ends and (is_hurried or rng.random() < 0.4):
        return ends[0]
    if is_hurried or rng.random() < 0.3:
        small = allowed[allowed < 256]
        closing = [int(token) for token in small if words.pieces[token] in _CLOSING]
        if closing:
            return rng.choice(closing)
    return int(allowed[rng.randrange(allowed.size)])
