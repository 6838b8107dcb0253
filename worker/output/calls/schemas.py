"""Argument types from a tool's JSON schema, and conversion of text to typed JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any
from urllib.parse import unquote

from worker.output.calls.literals import JSON, NUMBER, PYTHON, python_number, quote, transcode

Schema = Mapping[str, Any]

DEPTH_MAX = 16
"""Maximum nesting of alternatives and references that are followed in a schema."""
_KINDS = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "uint": "integer", "long": "integer", "short": "integer", "unsigned": "integer",
    "num": "number", "float": "number", "double": "number", "bool": "boolean", "binary": "boolean",
    "obj": "object", "dict": "object", "list": "array", "arr": "array", "null": "null", "none": "null",
}  # fmt: skip
"""JSON types, by prefixes of the type names that tools written in various languages use."""
_BOOLEANS = {
    "true": "true", "1": "true", "yes": "true", "on": "true",
    "false": "false", "0": "false", "no": "false", "off": "false",
}  # fmt: skip
NULLS = ("null", "none", "nil")


def kinds_of(schema: Schema, name: str) -> frozenset[str] | None:
    """Return the JSON types that the argument `name` may have; empty: unspecified; None: unknown argument.

    `schema`: the schema of all arguments as the client sent it, unvalidated.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return None
    return kinds_in(properties[name], schema)


def kinds_in(part: object, root: Schema) -> frozenset[str]:
    """Return the JSON types that a part of a schema allows; empty: unspecified."""
    return frozenset(_kinds(part, root, 0))


def fits(schema: Schema, arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments have all that are required, each of a type that it may have."""
    required = schema.get("required")
    if isinstance(required, list) and not all(name in arguments for name in required):
        return False
    return all(_may_be(value, kinds_of(schema, name)) for name, value in arguments.items())


def _may_be(value: object, kinds: frozenset[str] | None) -> bool:
    kind = _kind_of_value(value)
    return not kinds or kind in kinds or (kind == "integer" and "number" in kinds)


def _kinds(part: Any, root: Schema, depth: int) -> set[str]:
    if not isinstance(part, Mapping) or depth > DEPTH_MAX:
        return set()
    named = part.get("type")
    kinds = {_kind(name) for name in (named if isinstance(named, list) else [named])} - {""}
    values = part.get("enum")
    if isinstance(values, list):
        kinds |= {_kind_of_value(value) for value in values}
    if "const" in part:
        kinds.add(_kind_of_value(part["const"]))
    for among in ("anyOf", "oneOf", "allOf"):
        choices = part.get(among)
        for choice in choices if isinstance(choices, list) else []:
            kinds |= _kinds(choice, root, depth + 1)
    if isinstance(part.get("$ref"), str):
        kinds |= _kinds(_find(root, part["$ref"]), root, depth + 1)
    return kinds


def _kind(name: object) -> str:
    lowered = str(name).strip().lower() if isinstance(name, str) else ""
    return next((kind for begins, kind in _KINDS.items() if lowered.startswith(begins)), "")


def _kind_of_value(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, Sequence) else "object"


def _find(root: Schema, reference: str) -> Any:
    part: Any = root
    for name in unquote(reference).removeprefix("#").strip("/").split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def typed(text: str, kinds: frozenset[str]) -> str:
    """Convert text to JSON as the most specific of `kinds` that fits. If none fits, infer the type from the
    text, a string in the last resort."""
    stripped = text.strip()
    lowered = stripped.lower()
    if "null" in kinds and lowered in NULLS:
        return "null"
    if "integer" in kinds and (whole := _integer(stripped)):
        return whole
    if "number" in kinds and (number := _number(stripped)):
        return number
    if "boolean" in kinds and lowered in _BOOLEANS:
        return _BOOLEANS[lowered]
    if "string" in kinds and (string := _quoted(stripped)):
        return string
    if "string" in kinds and not kinds & {"object", "array"}:
        return quote(text)
    value = guessed(text)
    return quote(text) if "string" in kinds and value[0] not in "{[" else value


def _quoted(text: str) -> str | None:
    """Return a string in JSON's quotes, as grammars force it where another type is allowed too."""
    return transcode(text, JSON) if text.startswith('"') else None


def guessed(text: str) -> str:
    """Convert text to JSON with an inferred type: a JSON or Python literal, else a string."""
    stripped = text.strip()
    return transcode(stripped, JSON) or transcode(stripped, PYTHON) or quote(text)


def _integer(text: str) -> str | None:
    if not text.isascii():
        return None
    try:
        return str(int(text))
    except ValueError:
        number = float(_number(text) or "nan")
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else None


def _number(text: str) -> str | None:
    return text if NUMBER.fullmatch(text) and isfinite(float(text)) else python_number(text)
