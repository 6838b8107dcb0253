"""Guides: the state depends only on the answer's tokens; reasoning before it, and calls within it."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import Mask, Words, draw, small, wide
from worker.grammars import guide as guides
from worker.grammars.calls import CallForm, CallsGrammar, ToolSchema
from worker.grammars.guide import AnswerGrammar, CallGrammar, Markup
from worker.grammars.response_formats import grammar_of
from worker.output.channels import CALL, CONTENT, REASONING, Edges
from worker.values import Grammar, Guide, GuideError

EDGES: Edges = {CONTENT: [("<think>", REASONING), ("<tool_call>", CALL)], REASONING: [("</think>", CONTENT)]}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
DIGITS = StructuredOutput(kind="regex", text="[0-9]{2,4}")
JSON = StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA))
TOOLS = [ToolSchema("add", SCHEMA), ToolSchema("now")]


def held(
    words: Words, form: StructuredOutput, opening: str = CONTENT, *, thinks: bool = False, **more: bool
) -> AnswerGrammar:
    body = words.compiler.compile(grammar_of(form))
    hidden = (words.lexicon.names["<think>"],) if thinks else ()
    return AnswerGrammar((body,), words.lexicon, Markup(EDGES, words.lexicon), opening, hidden, **more)


def strict(words: Words, *, single: bool = False) -> CallGrammar:
    form = CallForm(None, names=words.lexicon.names)
    body = words.compiler.compile(CallsGrammar(form, TOOLS).behind(single=single))
    return CallGrammar(body, Markup(EDGES, words.lexicon))


def allowed(words: Words, grammar: Grammar, text: str | list[int]) -> set[str] | None:
    """Return the tokens allowed after a text, given as text or tokens; None: all."""
    tokens = words.spell_out(text) if isinstance(text, str) else text
    found = Mask(words.lexicon.width).allowed(grammar.open(tokens))
    if found is None:
        return None
    return {words.pieces[token].decode(errors="replace") for token in found}


END = "<|im_end|>"


def in_thought(words: Words) -> set[str]:
    """Return the tokens allowed in reasoning: all but end tokens."""
    return {piece.decode(errors="replace") for piece in words.pieces} - {END}


def test_content_is_held_from_its_first_token_and_then_ends() -> None:
    grammar, words = held(small(), DIGITS), small()
    first = allowed(words, grammar, "")
    assert first
    assert all(re.fullmatch("[0-9]+", text) for text in first)
    assert allowed(words, grammar, "1234") == {END}
    assert END in (allowed(words, grammar, "12") or set())
    # A request with `ignore_eos` may continue after an end token, with anything.
    assert allowed(words, grammar, "12" + END) == {END}
    assert allowed(words, grammar, "12" + END + "x") is None
    one, other, mask = grammar.open(()), grammar.open(()), Mask(words.lexicon.width)
    before = mask.of(other)
    for token in words.spell_out("1234"):
        one.accept_token(token)
        mask.of(one)
    assert mask.of(other) == before == mask.of(grammar.open(())), "guides do not see each other"


def test_a_thought_that_the_prompt_opens_may_be_anything_but_the_end() -> None:
    grammar = held(small(), DIGITS, opening=REASONING)
    for text in ("", "Let me <think>", "so: 12", "</thin", "</tool_call>"):
        assert allowed(small(), grammar, text) == in_thought(small())
    assert allowed(small(), grammar, "hm</think>12") == allowed(small(), held(small(), DIGITS), "12")
    plain = [small().pieces.index(bytes([byte])) for byte in b"hm</think>7"]
    assert allowed(small(), grammar, plain) == allowed(small(), held(small(), DIGITS), "7")


def test_a_model_may_begin_a_thought_itself_but_once_and_first() -> None:
    grammar = held(small(), DIGITS, thinks=True)
    assert "<think>" in (allowed(small(), grammar, "") or set())
    assert allowed(small(), grammar, "<think>whatever <think>") == in_thought(small())
    for text in ("1", "<think>hm</think>", "<think>hm</think>1"):
        assert "<think>" not in (allowed(small(), grammar, text) or {"<think>"})
    assert "<think>" not in (allowed(small(), held(small(), DIGITS), "") or {"<think>"})


def test_some_tokens_may_begin_a_thought_that_is_no_single_token() -> None:
    words = small()
    opening = tuple(words.spell_out("<c>"))
    body = words.compiler.compile(grammar_of(StructuredOutput(kind="regex", text="<[0-9]+")))
    edges = {CONTENT: [("<c>", REASONING)], REASONING: [("</think>", CONTENT)]}
    grammar = AnswerGrammar((body,), words.lexicon, Markup(edges, words.lexicon), hidden=opening)
    digits = {text for text in map(str, range(1000)) if text.encode() in words.pieces}
    assert allowed(words, grammar, "") == {"<"}
    assert allowed(words, grammar, "<") == digits | {"c"}
    assert allowed(words, grammar, "<c") == {">"}
    assert allowed(words, grammar, "<1") == digits | {END}
    assert allowed(words, grammar, "<c>x") == in_thought(words)
    assert allowed(words, grammar, "<c>x</think>") == {"<"}


def test_a_little_white_space_may_follow_a_thought() -> None:
    grammar = held(small(), JSON, opening=REASONING, has_blanks=True)
    begun = allowed(small(), grammar, "</think>") or set()
    assert {"\n", "\n\n", " ", "{"} <= begun
    assert "{" in (allowed(small(), grammar, "</think>\n\n") or set())
    assert all(text.startswith("{") for text in allowed(small(), grammar, "</think>\n\n\n\n") or {"\n"})
    assert allowed(small(), grammar, '</think>\n{"n":1}') == allowed(small(), grammar, '</think>{"n":1}')


def test_an_exact_form_has_none_but_passes_over_what_was_forced() -> None:
    grammar = held(small(), DIGITS, opening=REASONING)
    assert "\n" not in (allowed(small(), grammar, "</think>") or {"\n"})
    assert allowed(small(), grammar, "</think>\n\n12") == allowed(small(), grammar, "</think>12")
    spaced = held(small(), StructuredOutput(kind="regex", text="\n[0-9]"), opening=REASONING)
    assert allowed(small(), spaced, "</think>\n") != {"\n"}
    most = "</think>" + " " * guides.BLANKS_MAX
    assert allowed(small(), grammar, most + "12") is not None
    assert allowed(small(), grammar, most + " 12") is None


def test_a_call_is_held_from_its_marker_to_its_end_and_all_else_is_free() -> None:
    words, grammar = small(), strict(small())
    call = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
    free = ("", "I <think> <tool_call> </think> see", call, call + " and", "<tool_call", "<think><tool_call>")
    forced = ("<tool_call>nonsense", "<tool_call>nonsense<tool_call>")  # off the grammar
    for text in (*free, *forced):
        assert allowed(words, grammar, text) is None, text
    for begun in ("", call, "well, " + call + " and ", "<think></think>"):
        assert allowed(words, grammar, begun + "<tool_call>") == {"\n"}
        assert allowed(words, grammar, begun + call[: -len("</tool_call>")]) == {"</tool_call>"}
    plain = [words.pieces.index(bytes([byte])) for byte in b"<tool_call>\n{"]
    assert allowed(words, grammar, plain) == allowed(words, grammar, "<tool_call>\n{")


def thinking(words: Words) -> list[Grammar]:
    return [
        held(words, JSON, opening=REASONING, has_blanks=True),
        held(words, JSON, thinks=True),
        held(words, StructuredOutput(kind="json_object")),
        strict(words),
    ]


SPOKEN = ["Let", " me", "\n", "<think>", "</think>", "<tool_call>", "é"]


def spoken(words: Words, rng: random.Random) -> int:
    """Draw a token where all are allowed: sometimes a marker or an end token."""
    text = rng.choice([*SPOKEN, END]) if rng.random() < 0.6 else ""
    tokens = words.spell_out(text) if text else [rng.randrange(words.lexicon.width)]
    return tokens[0]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_resumed_answer_stands_where_it_stood(which: int, is_wide: bool) -> None:
    words = wide() if is_wide else small()
    grammar, mask = thinking(words)[which], Mask(words.lexicon.width)
    for seed in range(1 if is_wide else 4):
        tokens, _ = draw(words, grammar, seed, lambda rng: spoken(words, rng), limit=60)
        guide = grammar.open(())
        for place in range(len(tokens) + 1):
            assert mask.of(grammar.open(tokens[:place])) == mask.of(guide), (seed, place)
            if place < len(tokens):
                guide.accept_token(tokens[place])


@given(tokens=st.lists(st.integers(0, 1999), max_size=30), which=st.integers(0, 3))
@settings(max_examples=60)
def test_whatever_comes_something_may_follow(tokens: list[int], which: int) -> None:
    grammar = thinking(small())[which]
    found = Mask(small().lexicon.width).allowed(grammar.open(tokens))
    assert found is None or found.size


def fed(lark: str, text: str) -> Guide:
    words = small()
    return held(words, StructuredOutput(kind="lark", text=lark)).open(words.spell_out(text))


def test_a_grammar_that_llguidance_gives_up_fails_its_row() -> None:
    guide = fed('start: a\na: "x" a | "x" a "y" | "x" a "z" | "x" a "w" | "x" a "v" | "x"', "x" * 500)
    with pytest.raises(GuideError, match="max is 2000"):
        Mask(small().lexicon.width).of(guide)


def test_a_grammar_that_takes_ever_longer_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "SLOW_S", 0.002)
    guide = fed('start: e\ne: e e | e e e | "x"', "x" * 300)
    with pytest.raises(GuideError, match="per token"):
        Mask(small().lexicon.width).of(guide)
