"""Schemas that may be relaxed: accepted, held to as far as possible, and what is not enforced is named."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import draw, small
from tests.worker.grammars.schemas import schemas
from tests.worker.grammars.test_schema import CHAIN, REFUSED
from worker.grammars.compiler import GrammarError
from worker.grammars.guide import AnswerGrammar, Markup
from worker.grammars.response_formats import compile_relaxed, grammar_of

TEXTS = {"type": "array", "items": {"type": "string"}}
OPTIONAL = {"type": "object", "properties": {"a": {}, "b": {}}}
CLOSED = OPTIONAL | {"additionalProperties": False}


def relaxed(schema: Any) -> tuple[AnswerGrammar, tuple[str, ...]]:
    form = StructuredOutput(kind="json_schema", text=json.dumps(schema), strict=False)
    matcher, keywords = compile_relaxed(partial(grammar_of, form), small().compiler.compile)
    return AnswerGrammar((matcher,), small().lexicon, Markup({}, small().lexicon)), keywords


def answers(grammar: AnswerGrammar, count: int = 20) -> list[Any]:
    """Return random finished answers."""
    drawn = [draw(small(), grammar, seed) for seed in range(count)]
    return [json.loads(small().text(tokens)) for tokens, has_ended in drawn if has_ended]


@pytest.mark.parametrize("keyword", [name for name in REFUSED if not name.startswith("$dynamic")])
def test_unimplemented_keyword_is_ignored_and_named(keyword: str) -> None:
    assert relaxed({"type": ["object", "array"], keyword: REFUSED[keyword]})[1] == (keyword,)


@pytest.mark.parametrize(
    ("schema", "keywords"),
    [
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, ["oneOf"]),
        ({"type": "string", "pattern": "^(?=a)b"}, ["pattern"]),
        ({"allOf": [{"pattern": f"a.{{{k}}}b"} for k in range(5)]}, ["pattern"]),
        ({"$ref": "#/$defs/d0", "$defs": CHAIN | {"d5": {"type": "string"}}}, ["pattern"]),
        ({"const": 2**60}, ["const"]),
        ({"type": "integer", "minimum": 2**64}, ["minimum"]),
        (OPTIONAL | {"minProperties": 1}, ["minProperties"]),
        (
            {"propertyNames": {"pattern": "b"}, "allOf": [{"patternProperties": {"a": {}}}]},
            ["patternProperties", "propertyNames"],
        ),
        (CLOSED | {"minProperties": 1, "maxProperties": 2}, ["maxProperties"]),
        (
            {"type": "object", "patternProperties": {"a": {}, "b": {}}, "additionalProperties": False},
            ["additionalProperties", "patternProperties"],
        ),
        (
            {"properties": {str(k): {} for k in range(500)}, "additionalProperties": False},
            ["additionalProperties", "properties"],
        ),
        ({"type": "object", "properties": {"a": {"minProperties": 1, "$ref": "#"}}}, ["minProperties"]),
        (
            {"items": {"uniqueItems": True, "oneOf": [{"type": "array"}, {"maxItems": 3}]}},
            ["oneOf", "uniqueItems"],
        ),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], keywords: list[str]) -> None:
    assert [*relaxed(schema)[1]] == keywords


@given(schema=schemas())
@settings(max_examples=40)
def test_random_enforceable_schema_is_not_relaxed(schema: Any) -> None:
    assert relaxed(schema)[1] == ()


def test_relaxed_schema_is_held_to_in_all_else() -> None:
    number = {"type": "integer", "minimum": 3}
    tags = TEXTS | {"items": {"enum": ["x", "y"]}}
    schema = {
        "type": "object",
        "properties": {"tags": tags | {"uniqueItems": True}, "size": {"oneOf": [number, {"type": "number"}]}},
        "required": ["tags", "size"],
        "additionalProperties": False,
    }
    with pytest.raises(GrammarError):  # one without any value is refused all the same
        relaxed({"properties": {"a": False}, "required": ["a"], "type": "object"})
    grammar, keywords = relaxed(schema)
    assert keywords == ("oneOf", "uniqueItems")
    held = schema | {"properties": {"tags": tags, "size": {"anyOf": [number, {"type": "number"}]}}}
    found = answers(grammar)
    assert len(found) > 5
    for answer in found:
        jsonschema.validate(answer, held)
