"""JSON Schema support by keyword of draft 2020-12: enforced, or refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import small
from worker.grammars.compiler import GrammarError
from worker.grammars.references import SchemaError
from worker.grammars.response_formats import ResponseFormatError, grammar_of
from worker.grammars.schema import FORMATS, checked, parse

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SERVED: dict[str, Any] = {
    "$anchor": "a", "$comment": "a", "$defs": {}, "$id": "https://example.com/a", "$ref": "#/$defs/a",
    "$schema": DRAFT, "$vocabulary": {}, "additionalProperties": False, "allOf": [{}], "anyOf": [{}],
    "const": 1, "contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {},
    "default": 1, "deprecated": True, "description": "text", "enum": [1], "examples": [1],
    "exclusiveMaximum": 3, "exclusiveMinimum": 1, "format": "date", "items": {}, "maxItems": 2,
    "maxLength": 3, "maxProperties": 2, "maximum": 3, "minItems": 1, "minLength": 1, "minProperties": 1,
    "minimum": 1, "multipleOf": 2, "oneOf": [{"type": "string"}, {"type": "integer"}], "pattern": "a",
    "patternProperties": {"a": {}}, "prefixItems": [{}], "properties": {"a": {}}, "readOnly": True,
    "required": ["a"], "title": "text", "type": "object", "writeOnly": True,
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "$dynamicAnchor": "a", "$dynamicRef": "#a", "contains": {}, "dependentRequired": {},
    "dependentSchemas": {}, "else": {}, "if": {}, "maxContains": 1, "minContains": 1, "not": {"const": 1},
    "propertyNames": {"not": {"const": "a"}}, "then": {}, "unevaluatedItems": False,
    "unevaluatedProperties": False, "uniqueItems": True,
}  # fmt: skip


def compile_schema(schema: Any) -> None:
    small().compiler.compile(grammar_of(StructuredOutput(kind="json_schema", text=json.dumps(schema))))


def schema_with(keyword: str, value: Any) -> dict[str, Any]:
    return {"$defs": {"a": {"type": "integer"}}} | {keyword: value}


CHAIN = {f"d{k}": {"pattern": f"a.{{{k}}}b", "$ref": f"#/$defs/d{k + 1}"} for k in range(5)}


@pytest.mark.parametrize("keyword", SERVED)
def test_these_keywords_are_served(keyword: str) -> None:
    compile_schema(schema_with(keyword, SERVED[keyword]))


@pytest.mark.parametrize("keyword", REFUSED)
def test_these_are_refused_by_their_names(keyword: str) -> None:
    with pytest.raises(GrammarError, match=f'Unimplemented keys: \\["{keyword.replace("$", ".")}"'):
        compile_schema({"type": ["object", "array"], keyword: REFUSED[keyword]})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "min/maxProperties"),
        ({"pattern": "(?=a)b", "type": "string"}, "'pattern' with the look-around"),
        ({"minProperties": 2}, "minProperties"),
        ({"propertyNames": False}, "propertyNames"),
        ({"$ref": "#/x/1", "x": [{}, {"type": "object", "minProperties": 2}]}, "minProperties"),
        ({"const": 2**53 + 1}, "const"),
        ({"const": "a\x00"}, "control character"),
        ({"pattern": r"^\u0007"}, "control character"),
        ({"patternProperties": {r"\v": {}}}, "control character"),
        ({"allOf": [{"pattern": f"a.{{{k}}}b"} for k in range(5)]}, "'pattern'"),
        ({"$ref": "#/$defs/d0", "$defs": CHAIN}, "'pattern'"),
        ({"multipleOf": 10_001}, "multipleOf"),
        ({"const": 0.9999999999999999}, "digits"),
        ({"pattern": r"^[\x01-\x03]$"}, "control character"),
        ({"minimum": 2**64}, "bound"),
        ({"patternProperties": {str(number): {} for number in range(65)}}, "patternProperties"),
        ({"allOf": [{"patternProperties": {str(k): {}}} for k in range(501)]}, "patternProperties"),
        ({"properties": {str(number): {} for number in range(2001)}}, "optional 'properties'"),
        ({"$ref": "#/x", "x": {"items": {"minProperties": 2}, "y": {"$ref": "#/x/items"}}}, "minProperties"),
    ],
)
def test_unenforceable_schema_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises((GrammarError, SchemaError), match=said):
        compile_schema(schema)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_listed_format_is_enforced(name: str) -> None:
    compiled = small().compiler.compile(
        grammar_of(StructuredOutput(kind="json_schema", text=json.dumps({"type": "string", "format": name})))
    )
    assert compiled.deep_copy().try_consume_tokens(small().spell_out('" ')) == 1


ABOVE_1, UP_TO_1 = {"minimum": math.nextafter(1, 2)}, {"maximum": 1}
CHILD = {"required": ["a"], "properties": {"a": {"$ref": "#/$defs/x"}}, "type": "object"}
NEVER = {"not": {}}
EXACT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"minimum": 2**53 + 1, "maximum": 2**53 + 3, "exclusiveMinimum": -(2**70)},
     {"minimum": 2**53 + 2, "maximum": 2**53 + 2}),
    # The excluded bound that is nearer to 0 is one that a range narrower than 1 would allow.
    ({"exclusiveMinimum": 0, "maximum": 1}, {"minimum": 1e-48, "maximum": 1}),
    ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, {"maximum": 1.5} | ABOVE_1),
    ({"exclusiveMaximum": 0, "minimum": -0.5}, {"maximum": -1e-48, "minimum": -0.5}),
    ({"exclusiveMaximum": 0.5}, {"exclusiveMaximum": 0.5}),
    ({"exclusiveMinimum": 0, "maximum": 7, "multipleOf": 2}, {"minimum": 2, "maximum": 6, "multipleOf": 2}),
    ({"type": "integer", "multipleOf": 0.75}, {"type": "integer", "multipleOf": 3}),
    *[({"pattern": text}, {"pattern": text}) for text in ("[^\x00-\x1f]+", r"[\x00-\x1f]", r"\x0a", "\t")],
    # Names that are true, listed or matched.
    ({"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": ["string", "null"], "format": "uuid"}}},
     {"$defs": {"x": {"type": ["string", "null"], "format": "uuid"}}}),
    ({"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": UP_TO_1, "c": {}}},
     {"properties": {"a": UP_TO_1, "b": True, "c": False}, "additionalProperties": False}),
    ({"propertyNames": {"minLength": 2}, "additionalProperties": UP_TO_1},
     {"patternProperties": {r"^[\s\S]{2,}$": UP_TO_1}, "additionalProperties": False}),
    ({"patternProperties": {"^(x|[ab])$|^n\\.?$": UP_TO_1, "^c": {}}, "properties": {"a": {}}},
     {"properties": {"a": {"allOf": [{}, UP_TO_1]}, **dict.fromkeys(["b", "n", "n.", "x"], UP_TO_1)},
      "patternProperties": {"^c": {}}}),
    ({"anyOf": [NEVER, UP_TO_1]}, UP_TO_1),
    ({"properties": {"a": NEVER}}, {"properties": {"a": False}}),
    ({"$ref": "#/$defs/A[b c]", "$defs": {"A[b c]": UP_TO_1}},
     {"$ref": "#/$defs/A%5Bb%20c%5D", "$defs": {"A[b c]": UP_TO_1}}),
    # What has no finite value is left out where it is optional.
    ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": CHILD}},
     {"items": False, "$defs": {"x": CHILD | {"properties": {"a": False}}}}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "exact"), EXACT, ids=[json.dumps(schema)[:50] for schema, _ in EXACT])
def test_schema_becomes_what_llguidance_enforces(schema: dict[str, Any], exact: dict[str, Any]) -> None:
    assert checked(schema) == exact


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#/$defs/x", "$defs": {"x": CHILD}},
    {"$ref": "#/$defs/y", "$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}, {}]}, "y": CHILD}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    CHILD | {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, CHILD]}}},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_schema_without_a_finite_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="no valid value that ends"):
        checked(schema)
    checked(
        {"anyOf": [schema, {"type": "null"}], **{key: schema[key] for key in ("$defs",) if key in schema}}
    )


def test_one_of_several_references_is_served_only_where_no_value_fits_two() -> None:
    def tagged(*tags: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"enum": [*tags]}}, "required": ["kind"]}

    references = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    apart = references | {"$defs": {"a": tagged("x", "y"), "b": tagged("z")}}
    compile_schema(apart)
    for other in (tagged("y"), {"type": "object"}, tagged("z") | {"required": []}):
        with pytest.raises(GrammarError, match="oneOf"):
            compile_schema(apart | {"$defs": {"a": tagged("x", "y") | {"required": []}, "b": other}})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    text = '{"items":' * 150 + "{}" + "}" * 150
    with pytest.raises(SchemaError, match="nested"):
        parse(text)
    with pytest.raises((ResponseFormatError, SchemaError), match=r"JSON|nested"):
        parse('{"items":' * 20_000 + "{}" + "}" * 20_000)


def test_long_and_circular_references_are_followed_once() -> None:
    chain = {f"d{k}": {"allOf": [{"$ref": f"#/$defs/d{k + 1}"}] * 2} for k in range(3_000)}
    chain["d3000"] = {"$ref": "#/$defs/d0", "pattern": "a"}
    checked({"$ref": "#/$defs/d3000", "$defs": {"d3000": {"pattern": "a", "type": "string"}}})
    with pytest.raises(SchemaError, match="pattern"):
        checked({"$ref": "#/$defs/d0", "$defs": chain})


@pytest.mark.parametrize("place", ["components/schemas", "a~1b"])
def test_schema_is_checked_wherever_a_reference_leads(place: str) -> None:
    """Also in places that hold no schemas by themselves, such as OpenAPI's components."""

    def at_place(schema: dict[str, Any]) -> dict[str, Any]:
        inner: Any = {"thing": schema}
        for name in reversed(place.split("/")):
            inner = {name.replace("~1", "/"): inner}
        return {"$ref": f"#/{place}/thing", **inner}

    with pytest.raises(SchemaError, match="minProperties"):
        checked(at_place({"type": "object", "minProperties": 2}))
    assert checked(at_place({"format": "color"})) == at_place({})
    compile_schema(at_place({"type": "string", "format": "color"}))
