"""Structured output for `bench.grammars`: seeded JSON schemas, by llguidance, with a vocabulary of Qwen3's
size.

No vocabulary of that size is available offline, so the tests' own is extended: each new token joins two
others. To a grammar these random tokens look like text: whole words, tails, punctuation.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from bench.models import VOCABULARY_WIDE
from tests.models.fixtures import model_folder
from tests.models.tokenizer import END_OF_TURN
from tests.worker.rules import Unforeseeing

TOKEN_CHARACTERS_MAX = 14
# fmt: off
_NAMES = (
    "name", "age", "email", "street", "city", "tags", "price", "count", "kind", "status", "created", "items",
    "owner", "level", "note", "code",
)
_WORDS = (
    "red", "green", "blue", "alpha", "beta", "gamma", "delta", "north", "south", "east", "west", "open",
)
# fmt: on
_PATTERNS = ("^[A-Z]{3}-[0-9]{4}$", "^[a-z]+(_[a-z]+)*$", "^#[0-9a-f]{6}$")
_FORMATS = ("date", "date-time", "uuid", "email")


def wide_tokenizer() -> LLTokenizer:
    """Return the tokenizer for llguidance, with its default slices. Takes two seconds."""
    whole = wide_tokenizer_file()
    end = next(token["id"] for token in whole["added_tokens"] if token["content"] == END_OF_TURN)
    return LLTokenizer(json.dumps(whole), eos_token=end)


def wide_tokenizer_file() -> dict[str, Any]:
    """Return a tokenizer.json of `VOCABULARY_WIDE` tokens, with the tokens that are not text at the end."""
    whole: dict[str, Any] = json.loads((model_folder("dense") / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = whole["model"]["vocab"]
    added = whole["added_tokens"]
    first = VOCABULARY_WIDE - len(added)
    _merge_on(vocabulary, whole["model"]["merges"], first)
    for number, token in enumerate(added):
        token["id"] = first + number
    return whole


def _merge_on(vocabulary: dict[str, int], merges: list[list[str]], size: int) -> None:
    sampling = random.Random(0)
    pieces = list(vocabulary)
    tails = [piece for piece in pieces if piece.isascii() and piece.isalpha()]
    while len(vocabulary) < size:
        pair = [sampling.choice(pieces), sampling.choice(tails)]
        piece = "".join(pair)
        if len(piece) <= TOKEN_CHARACTERS_MAX and piece not in vocabulary:
            vocabulary[piece] = len(vocabulary)
            merges.append(pair)
            pieces.append(piece)


def random_schema(seed: int, depth: int = 2) -> dict[str, Any]:
    """Return an object schema of three to seven properties, nested `depth` deep, with bounded strings and
    lists."""
    return _object(random.Random(seed), depth)


def _object(sampling: random.Random, depth: int) -> dict[str, Any]:
    names = sampling.sample(_NAMES, sampling.randint(3, 7))
    return {
        "type": "object",
        "properties": {name: _value(sampling, depth) for name in names},
        "required": names[: sampling.randint(1, len(names))],
        "additionalProperties": False,
    }


def _value(sampling: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["text", "text", "choice", "integer", "number", "boolean", "pattern", "format"]
    match sampling.choice(kinds + ["list", "object"] * (depth > 0)):
        case "text":
            return {"type": "string", "maxLength": sampling.randint(8, 40)}
        case "choice":
            return {"enum": [f"{word}{sampling.randint(0, 99)}" for word in sampling.sample(_WORDS, 5)]}
        case "pattern":
            return {"type": "string", "pattern": sampling.choice(_PATTERNS)}
        case "format":
            return {"type": "string", "format": sampling.choice(_FORMATS)}
        case "list":
            return {"type": "array", "items": _value(sampling, depth - 1), "minItems": 1, "maxItems": 5}
        case "object":
            return _object(sampling, depth - 1)
        case kind:
            return {"type": kind}


@dataclass
class Costs:
    """Times of the grammar matchers in microseconds: of each mask, including consuming the token before
    it."""

    masks: list[float] = field(default_factory=list)


@dataclass
class EndlessGuide(Unforeseeing):
    """`guides.Guide` that begins again when its answer is complete, so a row can be measured indefinitely."""

    matcher: LLMatcher
    costs: Costs
    _seen_s: float = 0.0

    def accept_token(self, token: int) -> None:
        began = time.perf_counter()
        assert self.matcher.consume_token(token), self.matcher.get_error()
        if self.matcher.is_stopped():
            self.matcher.reset()
        self._seen_s += time.perf_counter() - began

    def fill(self, mask: memoryview) -> bool:
        began = time.perf_counter()
        self.matcher.unsafe_compute_mask_ptr(np.frombuffer(mask, np.uint32).ctypes.data, mask.nbytes)
        self.costs.masks.append(1e6 * (self._seen_s + time.perf_counter() - began))
        self._seen_s = 0.0
        return True


@dataclass(frozen=True)
class SchemaGrammar:
    """`guides.Grammar`."""

    tokenizer: LLTokenizer
    schema: dict[str, Any]
    costs: Costs

    def open(self, answered: Sequence[int]) -> EndlessGuide:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(self.schema))
        guide = EndlessGuide(LLMatcher(self.tokenizer, grammar), self.costs)
        for token in answered:
            guide.accept_token(token)
        return guide
