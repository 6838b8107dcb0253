"""Conversion of text to an argument by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.output.calls.written import nested, texts
from worker.output.calls.schemas import guessed, kinds_of, typed

ALL = ["string", "integer", "number", "boolean", "null", "object", "array"]
BROKEN: list[Any] = [None, 5, "x", [], {"properties": []}, {"properties": {"a": 5}}]


def kinds(part: Any, **root: Any) -> set[str] | None:
    found = kinds_of({"properties": {"a": part}, **root}, "a")
    return None if found is None else set(found)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "string"}, {"string"}), ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"oneOf": [{"allOf": [{"type": "number"}]}, {"anyOf": [{"type": "array"}]}]}, {"number", "array"}),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, {*ALL}), ({"const": "x"}, {"string"}),
        ({"$ref": "#/$defs/Unit"}, {"string"}), ({"$ref": "#/$defs/Self"}, set()),
        ({"type": "int32"}, {"integer"}), ({"type": "dict"}, {"object"}), ({"type": "mystery"}, set()),
        (True, set()), ({"type": 5, "enum": 5, "anyOf": 5, "$ref": 5}, set()),
    ],
)  # fmt: skip
def test_kinds_are_found_wherever_a_schema_says_them(part: Any, expected: set[str]) -> None:
    defs = {"Unit": {"enum": ["c", "f"]}, "Self": {"$ref": "#/$defs/Self"}}
    assert kinds(part, **{"$defs": defs}) == expected


@given(nested | st.sampled_from(BROKEN))
def test_a_schema_that_is_none_is_no_error(schema: Any) -> None:
    found = kinds_of(schema if isinstance(schema, dict) else {"properties": schema}, "a")
    assert found is None or found <= {*ALL}


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", {"integer"}, 5), ("5", {"string"}, "5"), ("5.0", {"integer"}, 5), ("2.5", {"integer"}, 2.5),
        ("007", {"integer"}, 7), (" +5 ", {"integer"}, 5), ("five", {"integer"}, "five"),
        ("90071992547409930001", {"integer"}, 90071992547409930001), ("1e3", {"number"}, 1000.0),
        (".5", {"number"}, 0.5), ("nan", {"number"}, "nan"), ("True", {"boolean"}, True),
        ("no", {"boolean"}, False), ("maybe", {"boolean"}, "maybe"), ("None", {"integer", "null"}, None),
        ("5", {"string", "integer"}, 5), ("5x", {"string", "integer"}, "5x"),
        ("{'a': (1, None)}", {"object"}, {"a": [1, None]}), ("٣", {"integer"}, "٣"),
        ("[1", {"array"}, "[1"), ("5", {"string", "array"}, "5"), ("[5]", {"string", "array"}, [5]),
    ],
)  # fmt: skip
def test_text_becomes_the_kind_that_it_can_be(text: str, kinds: set[str], value: Any) -> None:
    read = json.loads(typed(text, frozenset(kinds)))
    assert read == value
    assert type(read) is type(value) or isinstance(value, float)


@given(texts, st.frozensets(st.sampled_from(ALL)))
def test_whatever_the_text_it_becomes_json(text: str, kinds: frozenset[str]) -> None:
    for said in (typed(text, kinds), guessed(text)):
        json.loads(said)
