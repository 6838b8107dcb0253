"""Random answers from a response format's grammar have that format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import Words, draw, small, wide
from tests.worker.grammars.schemas import schemas
from worker.grammars.response_formats import ResponseFormatError, grammar_of

SEEDS = st.integers(0, 2**32)


def texts(words: Words, form: StructuredOutput, seeds: list[int]) -> list[str]:
    grammar = words.grammar(grammar_of(form))
    drawn = [draw(words, grammar, seed) for seed in seeds]
    return [words.text(tokens) for tokens, has_ended in drawn if has_ended]


def of_schema(schema: Any) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", text=json.dumps(schema))


def check(words: Words, schema: Any, seeds: list[int]) -> None:
    found = texts(words, of_schema(schema), seeds)
    event(f"{len(found)} of {len(seeds)} have ended")
    for text in found:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("words", [small, wide])
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=20)
def test_output_is_valid_by_its_schema(words: Callable[[], Words], data: st.DataObject, seed: int) -> None:
    for number in range(4 if words is small else 1):
        check(words(), data.draw(schemas()), [seed, seed + number])


INTEGER: dict[str, Any] = {"type": "integer"}


def tagged(kind: str, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, key: INTEGER},
        "required": ["kind", key],
    }


STRICT_SCHEMAS: dict[str, Any] = {
    "a tagged union": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {"cat": tagged("cat", "lives"), "dog": tagged("dog", "years")},
    },
    "a map": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3},
    "another draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER],
        "additionalItems": {"type": "boolean"},
        "maxItems": 3,
    },
    "merged": {
        "type": "object",
        "allOf": [
            {"properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
    },
}


@pytest.mark.parametrize("name", STRICT_SCHEMAS)
def test_schema_that_llguidance_alone_enforces_loosely_yields_valid_output(name: str) -> None:
    schema = STRICT_SCHEMAS[name]
    found = texts(small(), of_schema(schema), list(range(24)))
    assert len(found) > 12
    for text in found:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("blank", ["\n", " ", "\t", "\r\n"])
def test_white_space_has_an_end(blank: str) -> None:
    """Even an answer that always prefers line ends terminates."""
    words = small()
    matcher = words.compiler.compile(grammar_of(StructuredOutput(kind="json_object"))).deep_copy()
    assert 1 < matcher.validate_tokens(words.spell_out("{" + blank + " " * 100)) < 50
    assert matcher.validate_tokens(words.spell_out("{\n\n")) == 2


PATTERNS = [r"\d+\.\d+", "^abc$", "(fo|bar)+", r"\$5", "é|日本", r"[a-z]+\s[a-z]+", ""]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_is_matched_by_the_whole_content(pattern: str) -> None:
    found = texts(small(), StructuredOutput(kind="regex", text=pattern), list(range(20)))
    assert found
    assert all(re.fullmatch(pattern, text) for text in found), found


CHOICES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1)


@given(choices=CHOICES, seed=SEEDS)
@settings(max_examples=40)
def test_a_choice_is_one_of_them(choices: list[str], seed: int) -> None:
    (text,) = texts(small(), StructuredOutput(kind="choice", text=json.dumps(choices)), [seed])
    assert text in choices


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (StructuredOutput(kind="json_schema", text="{"), "not JSON"),
        (StructuredOutput(kind="json_schema", text="[]"), "not an object"),
        (StructuredOutput(kind="json_schema", text="false"), "allows nothing"),
        (StructuredOutput(kind="json_schema", text="\ud800"), "not valid Unicode"),
        (StructuredOutput(kind="json_schema", text='"' + "x" * 300_000 + '"'), "long"),
        (StructuredOutput(kind="choice", text="[]"), "0 choices"),
        (StructuredOutput(kind="choice", text='{"a": 1}'), "not a list of strings"),
        (StructuredOutput(kind="haiku"), "haiku"),
    ],
)
def test_a_form_that_is_none_is_refused(form: StructuredOutput, said: str) -> None:
    with pytest.raises(ResponseFormatError, match=said):
        grammar_of(form)
