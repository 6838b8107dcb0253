"""llguidance's view of each kind of tokenizer: random answers decode to text that the grammar allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import ByT5Tokenizer

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import Words, draw, small, wide, words_of
from tests.worker.output.test_text import FALLBACK_DECODERS
from worker.grammars.response_formats import grammar_of
from worker.output.text import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"the": {"type": "string"}, "b": {"enum": ["a the b", "c"]}, "n": {"type": "number"}},
    "required": ["the", "b"],
    "additionalProperties": False,
}


def byte_fallback(decoder: Any) -> tuple[Words, Callable[[list[int]], str]]:
    """A tokenizer as in Llama 2 and Gemma: words with ▁ for a space, and 256 byte tokens."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "▁▁", "▁the", '▁"', "a", "b", "é", "你", '"', "{", "}", ":", "the", "</s>", "<think>"):
        pieces[piece] = len(pieces)
    tokenizer = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.decoder = decoder
    inner = SimpleNamespace(backend_tokenizer=tokenizer)
    return words_by(inner, len(pieces), pieces["</s>"]), tokenizer.decode


def slow() -> tuple[Words, Callable[[list[int]], str]]:
    """A tokenizer without a Rust backend. Its tokens are bytes."""
    tokenizer = ByT5Tokenizer()
    words = words_by(tokenizer, len(tokenizer), tokenizer.eos_token_id)
    return words, lambda tokens: str(tokenizer.decode(tokens))


def words_by(tokenizer: Any, width: int, end: int) -> Words:
    vocabulary = Vocabulary(tokenizer)
    names = {token: vocabulary.spell(token).decode() for token in {*vocabulary.special, end}}
    return words_of([vocabulary.spell(token) for token in range(width)], names, [end])


@pytest.mark.parametrize("kind", ["gemma", "llama", "slow"])
def test_sampled_tokens_decode_to_valid_structured_output(kind: str) -> None:
    words, decode = slow() if kind == "slow" else byte_fallback(FALLBACK_DECODERS[kind]())
    form = StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA))
    grammar = words.grammar(grammar_of(form))
    drawn = [draw(words, grammar, seed) for seed in range(20)]
    ended = [decode(tokens) for tokens, has_ended in drawn if has_ended]
    assert len(ended) > 6
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("words", [small, wide])
def test_tokens_are_spelled_as_their_bytes_and_special_ones_as_none(words: Callable[[], Words]) -> None:
    known = words()
    for token, piece in enumerate(known.pieces):
        if piece == b"\xff":
            continue  # occurs in no text, and marks special tokens
        assert known.lexicon.spell(token) == (b"" if token in known.lexicon.special else piece)
    assert known.lexicon.spell(known.lexicon.width) == b""
