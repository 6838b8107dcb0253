"""Jump-forward tokens: each is allowed, and a certain one is the only allowed token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import Mask, Words, draw, small, wide
from tests.worker.grammars.schemas import Schema, schemas
from worker.grammars import guide as guide_module
from worker.grammars import jump_forward
from worker.grammars.compiler import GrammarError
from worker.grammars.guide import AnswerGrammar, Markup
from worker.grammars.jump_forward import expected_space
from worker.grammars.response_formats import ResponseFormatError, grammar_of
from worker.output.channels import CALL, CONTENT, REASONING
from worker.values import ForcedTokens, Guide

OBJECT: Schema = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "is_raining": {"const": True}},
    "required": ["temperature", "is_raining"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the time limit of jump-forward, which depends on this machine."""
    for module in (guide_module, jump_forward):
        monkeypatch.setattr(module, "FORESEE_S_MAX", 60.0)


def held(words: Words, schema: Schema) -> AnswerGrammar:
    return words.grammar(grammar_of(StructuredOutput(kind="json_schema", text=json.dumps(schema))))


def text_ahead(words: Words, guide: Guide) -> str:
    return words.text(guide.forced_tokens(40).tokens)


def check_ahead(words: Words, guide: Guide) -> int:
    """Check that forced tokens are allowed, and certain ones the only choice; return their number."""
    foreseen, mask = guide.forced_tokens(12), Mask(words.lexicon.width)
    before = mask.of(guide)
    assert len(foreseen.tokens) <= 12
    assert foreseen.certain <= len(foreseen.tokens)
    assert guide.forced_tokens(12) == foreseen, "the call must not change the guide"
    assert mask.of(guide) == before
    for place, token in enumerate(foreseen.tokens):
        allowed = mask.allowed(guide)
        assert allowed is not None
        assert token in allowed
        if place < foreseen.certain:
            assert allowed.tolist() == [token]
        elif place == foreseen.certain:
            assert allowed.size > 1
        guide.accept_token(token)
    return len(foreseen.tokens)


@given(schema=schemas(), seed=st.integers(0, 10), is_wide=st.booleans())
@settings(max_examples=25)
def test_jumped_tokens_are_allowed_and_certain_ones_alone(schema: Schema, seed: int, is_wide: bool) -> None:
    words = wide() if is_wide else small()
    try:
        grammar = held(words, schema)
    except (ResponseFormatError, GrammarError):
        return
    tokens, _ = draw(words, grammar, seed, limit=60)
    for end in range(0, len(tokens), 5):
        check_ahead(words, grammar.open(tokens[:end]))


def test_names_what_stands_between_them_and_the_end_follow() -> None:
    words = small()
    assert text_ahead(words, held(words, OBJECT).open(())) == '{"temperature": '
    assert check_ahead(words, held(words, OBJECT).open(words.spell_out('{"temperature": 21, "i'))) > 3
    guide = held(words, OBJECT).open(words.spell_out('{"temperature": 21, "is_raining": t'))
    foreseen = guide.forced_tokens(9)
    assert words.text(foreseen.tokens) == "rue}"
    assert foreseen.tokens[-1] in words.ends
    closed = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    foreseen = held(words, closed).open(words.spell_out('{"a": true  ')).forced_tokens(9)
    assert foreseen == ForcedTokens((*words.spell_out("}"), *words.ends), certain=2)
    guide = held(words, OBJECT).open(words.spell_out('{\n  "temperature":21'))  # laid out as it began
    for token in words.spell_out(","):
        guide.accept_token(token)
    assert text_ahead(words, guide) == ' "is_raining":true}'


def test_white_space_is_that_behind_the_same_mark() -> None:
    said = b""
    for more, space in ((b"{", b""), (b'\n  "a":', b" "), (b"1,\n ", b""), (b' "b":', b""), (b"2,\n ", b" ")):
        said += more
        assert expected_space(said) == space, said


def test_jump_forward_yields_no_tokens_in_reasoning_and_free_text() -> None:
    words = small()
    body = words.compiler.compile(grammar_of(StructuredOutput(kind="json_schema", text=json.dumps(OBJECT))))
    edges = {REASONING: [("</think>", CONTENT)], CONTENT: [("<tool_call>", CALL)]}
    guide = AnswerGrammar((body,), words.lexicon, Markup(edges, words.lexicon), REASONING).open(())
    assert guide.forced_tokens(9) == ForcedTokens()
    guide.accept_token(words.lexicon.names["</think>"])
    assert words.text(guide.forced_tokens(1).tokens) == '{"'
    assert guide.forced_tokens(9).certain == 0, "white space may precede it"


def test_slow_jump_forward_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    words = small()
    guide = held(words, OBJECT).open(())
    monkeypatch.setattr(guide_module, "FORESEE_S_MAX", -1.0)
    for _ in range(guide_module.OPAQUE_LOOKS):
        assert guide.forced_tokens(9).tokens
    assert guide.forced_tokens(9) == ForcedTokens()
    monkeypatch.setattr(jump_forward, "FORESEE_S_MAX", -1.0)
    assert held(words, OBJECT).open(()).forced_tokens(9) == ForcedTokens()
