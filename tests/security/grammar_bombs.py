"""Schemas, patterns and grammars that are expensive to compile or to enforce. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Fields = dict[str, Any]


def _schema(schema: object) -> Fields:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = _holding(schema)
    return schema


def _branched(depth: int, keyword: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema, {"type": "object", "properties": {"b": schema}}]}
    return schema


def _properties(count: int, *, required: bool) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return schema | ({"required": names} if required else {})


def _doubling(depth: int) -> dict[str, Any]:
    """Return a schema whose references double at each level: 2 to the power of `depth` leaves."""
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, depth + 1):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {
            "type": "object",
            "properties": {"a": below, "b": below},
            "required": ["a", "b"],
        }
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth}"}


def _holding(schema: Fields) -> Fields:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def _chain(length: int, link: Callable[[Fields], Fields]) -> Fields:
    """Return a schema whose definitions refer each to the next one."""
    definitions = {f"{n:x}": link({"$ref": f"#/$defs/{n + 1:x}"}) for n in range(length)}
    return {"$defs": definitions | {f"{length:x}": {"type": "string"}}, "$ref": "#/$defs/0"}


def _schemas() -> Iterator[tuple[str, object]]:
    yield "90 levels of objects", _nested(90)
    yield "100 levels of objects", _nested(100)
    yield "a doubled reference, 40 levels", _doubling(40)
    yield "anyOf in anyOf", _branched(12, "anyOf")
    yield "oneOf in oneOf", _branched(10, "oneOf")
    yield "allOf in allOf", _branched(10, "allOf")
    yield "400 optional properties", _properties(400, required=False)
    yield "10,000 optional properties", _properties(10_000, required=False)
    yield "4,000 required properties", _properties(4_000, required=True)
    yield "an enum of 10,000", {"enum": [f"value {number}" for number in range(10_000)]}
    yield "an enum of 200 kB", {"enum": ["x" * 100_000 + str(number) for number in range(2)]}
    yield "a reference to itself", {"$ref": "#"}
    yield (
        "references in a circle",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    )
    yield "a reference elsewhere", {"$ref": "http://127.0.0.1/secret.json"}
    yield "a billion items", {"type": "array", "items": {"type": "string"}, "minItems": 10**9}
    yield "lists of lists", {"type": "array", "items": {"type": "array", "maxItems": 2000}, "maxItems": 2000}
    yield "a billion characters", {"type": "string", "minLength": 10**9}
    yield "a multiple of a prime", {"type": "integer", "multipleOf": 9973, "maximum": 10**15}
    yield "a pattern of groups", {"type": "string", "pattern": "^(a+)+$"}
    yield "a pattern of repetitions", {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}
    yield "an alternation", {"type": "string", "pattern": "^(" + "|".join(["a", "aa"] * 2000) + ")*b$"}
    yield "an intersection", {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(1, 40)]}
    yield (
        "names by pattern",
        {"type": "object", "patternProperties": {f"^.*{n}.*$": {"type": "string"} for n in range(64)}},
    )
    yield "false", False
    yield "a chain of 9,000 references", _chain(9_000, lambda below: below)
    yield "a chain of 1,500 objects", _chain(1_500, _holding)


def _patterns() -> Iterator[tuple[str, str]]:
    yield "repetitions", "(((a{1,1000}){1,1000}){1,1000})"
    yield "an exponential automaton", "[ab]*a[ab]{200}"
    yield "look-around", "(?=(a+))a*b\\1"
    yield "classes of all letters", "\\p{L}{1,10000}"
    yield "10,000 alternatives", "|".join(f"word{number}" for number in range(10_000))
    yield "an open group", "(" * 5000
    yield "nested groups", "(" * 2000 + "a" + ")*" * 2000


def _grammars() -> Iterator[tuple[str, str]]:
    yield "ambiguous", 'start: s\ns: s s | s s s | "a" | ""'
    yield "left recursion", 'start: start start start | "a"'
    yield "a missing rule", "start: nowhere"
    yield (
        "5,000 rules",
        "start: r0\n" + "".join(f'r{n}: r{n + 1} | "a"\n' for n in range(5000)) + 'r5000: "b"',
    )
    yield "empty for ever", 'start: a*\na: b*\nb: ""*'
    yield "a terminal of repetitions", "start: A\nA: /(a{1,500}){1,500}/"
    yield "an import", "%import common.WORD\n%import .secret.X\nstart: WORD"


def all_bombs() -> Iterator[tuple[str, Fields]]:
    """Yield name and body fields of each."""
    for name, schema in _schemas():
        yield f"schema: {name}", _schema(schema)
    for name, pattern in _patterns():
        yield f"pattern: {name}", {"guided_regex": pattern}
    for name, grammar in _grammars():
        yield f"grammar: {name}", {"guided_grammar": grammar}
    yield "50,000 choices", {"guided_choice": [f"choice {number}" for number in range(50_000)]}
    yield "a schema of 300 kB", _schema({"description": "x" * 300_000, "type": "string"})
