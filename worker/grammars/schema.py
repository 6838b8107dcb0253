"""JSON schemas before they are compiled: what of them can be held to, and how JSON is written. Pure.

llguidance refuses the keywords that it does not know, by name. Beyond that are those that it takes and would
hold to loosely, or at a price that no request may have: they are mended here where that makes a schema only
stricter, and refused where it does not. So whatever is generated is valid by the whole schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

SCHEMA_BYTES_MAX = 256 * 2**10
DEPTH_MAX = 100
"""Of schemas within each other: the parser of llguidance takes 128 levels of JSON."""
PATTERN_PROPERTIES_MAX = 64
"""In one object: each is compared with each, for more than a second where they are 200."""
OPTIONAL_MAX = 2_000
"""Properties that one object may have or not: compiling takes the square of their number."""
MULTIPLE_MAX = 10_000
"""Digits of `multipleOf`, its point left out: as many states as that has the automaton that divides."""
EXACT_MAX = 2**53
"""Beyond it not every integer is a float, which is what llguidance counts in."""
BOUND_MAX = 9_200_000_000_000_000_000
"""The widest bound of numbers that it takes is a little less than 64 bits."""

WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
"""Between two parts of a JSON text, at most once: a blank or two, or a line's end and an indentation. Enough
to print deep values prettily. Without a bound small models fill their whole answer with line ends."""

_WRITING = {
    "whitespace_pattern": WHITE_SPACE,
    "lenient": False,
    "coerce_one_of": False,
    # No \\uXXXX: `"\\u0061"` is `"a"` once more, which would be a key twice, and a way around patterns.
    "json_allowed_escapes": 'nrbtf\\"',
}
# What JSON could have as \\uXXXX alone. llguidance would leave such a character out of a constant.
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_HEX = "0[0-7be-f]|1[0-9a-f]|7f"
_UNWRITTEN_IN_PATTERN = re.compile(
    rf"{_UNWRITTEN.pattern}|\\[avc0]|\\(?:x|u00)(?:{_HEX})|\\[xu]{{0*(?:[0-7be-f]|{_HEX})}}", re.IGNORECASE
)
_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]")
_ONE = ("additionalProperties", "additionalItems", "items")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_KINDS: Mapping[type, set[str]] = {
    dict: {"properties", "patternProperties", "$defs", "definitions"},
    list: {"required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"},
    str: {"pattern", "format", "$ref"},
    int: {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"},
}
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a number of things"}
_BOUNDS = {
    "minimum": math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "exclusiveMaximum": -math.inf,
}

Schema = dict[str, Any]


class SchemaError(Exception):
    """Why a schema cannot be held to; a sentence without its subject, which is the schema."""


def parse(text: str | bytes) -> Schema:
    """A schema from its JSON. Raises `SchemaError`."""
    if len(text) > SCHEMA_BYTES_MAX:
        raise SchemaError(f"is {len(text)} bytes long, and may be {SCHEMA_BYTES_MAX}")
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise SchemaError(f"is not JSON: {error}") from None
    return checked(schema)


def checked(schema: object) -> Schema:
    """The same values and no others, as far as llguidance understands it. Raises `SchemaError`."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("is not an object" if schema is not False else "allows nothing: it is 'false'")
    root = {key: value for key, value in schema.items() if key != "x-guidance"}
    mended: Schema = _mended(root, root, 0)
    return mended


def spelled(schema: Mapping[str, Any]) -> str:
    """As JSON, with what says how JSON is written."""
    return json.dumps({**schema, "x-guidance": _WRITING}, ensure_ascii=False)


def within(schema: Mapping[str, Any], part: object) -> object:
    """A part of a schema by itself, with what it may refer to."""
    if not isinstance(part, dict):
        return part
    return {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema} | part


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """What a reference within the same text stands for, and anything else as it is."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
            return schema
        schema = _looked_up(str(schema["$ref"]), root)
    return {}


def _looked_up(reference: str, root: Mapping[str, Any]) -> object:
    place: Any = root if reference.startswith("#") else {}
    for name in filter(None, reference.removeprefix("#").split("/")):
        place = place.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(place, dict) else {}
    return place


def _mended(schema: Any, root: Schema, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError("has in it a schema that is not an object")
    if depth > DEPTH_MAX:
        raise SchemaError(f"is nested more than {DEPTH_MAX} levels deep")
    _check(schema)
    mended = {key: _within(key, value, root, depth + 1) for key, value in schema.items()}
    if "prefixItems" in mended:
        mended.pop("additionalItems", None)  # of older drafts; llguidance would leave `prefixItems` out
    _mend_numbers(mended)
    if "oneOf" in mended and "anyOf" not in mended and _are_disjoint(mended["oneOf"], root):
        mended = {"anyOf" if key == "oneOf" else key: value for key, value in mended.items()}
    return mended


def _within(key: str, value: Any, root: Schema, depth: int) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _mended(part, root, depth) for name, part in value.items()}
    if key in _MANY and isinstance(value, list):
        return [_mended(part, root, depth) for part in value]
    return _mended(value, root, depth) if key in _ONE else value


def _check(schema: Schema) -> None:
    """What is taken for granted from here on, and that nothing is too much, or held to loosely."""
    for kind, keywords in _KINDS.items():
        for keyword in keywords & schema.keys():
            _check_kind(keyword, schema[keyword], kind)
    _check_object(schema)
    for constant in _scalars([schema.get("enum"), schema.get("const")]):
        _check_constant(constant)
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        if found := _UNWRITTEN_IN_PATTERN.search(_CLASS.sub("", pattern)):
            raise SchemaError(f"has in a 'pattern' the control character {found[0]!r}")


def _check_kind(keyword: str, value: object, kind: type) -> None:
    is_negative = isinstance(value, int) and value < 0
    if not isinstance(value, kind) or isinstance(value, bool) or is_negative:
        raise SchemaError(f"has a '{keyword}' that is not {_NAMES[kind]}")
    if keyword == "required" and not all(isinstance(name, str) for name in _items(value)):
        raise SchemaError("has a 'required' that is not a list of strings")


def _check_object(schema: Schema) -> None:
    required: list[str] = schema.get("required", [])
    fewest: int = schema.get("minProperties", 0)
    if len(schema.get("patternProperties", ())) > PATTERN_PROPERTIES_MAX:
        raise SchemaError(f"has more than {PATTERN_PROPERTIES_MAX} 'patternProperties' in one object")
    if len(schema.get("properties", ())) - len(required) > OPTIONAL_MAX:
        raise SchemaError(f"has more than {OPTIONAL_MAX} optional 'properties' in one object")
    # Of names that are not listed each may come twice, and would be one property.
    if fewest > 1 + len(required):
        raise SchemaError("has 'minProperties' above the number of required properties and one more")


def _check_constant(constant: object) -> None:
    if isinstance(constant, int) and abs(constant) > EXACT_MAX:
        raise SchemaError(f"has in 'const' or 'enum' the number {constant}, which no float is exactly")
    if isinstance(constant, str) and (found := _UNWRITTEN.search(constant)):
        raise SchemaError(f"has in 'const' or 'enum' the control character {found[0]!r}")


def _items(values: object) -> list[object]:
    return values if isinstance(values, list) else []


def _scalars(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, dict):
            yield from _scalars(value.values())
        elif isinstance(value, list):
            yield from _scalars(value)
        else:
            yield value


def _mend_numbers(schema: Schema) -> None:
    step = schema.get("multipleOf")
    if isinstance(step, int | float) and not isinstance(step, bool):
        if int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits))) > MULTIPLE_MAX:
            raise SchemaError(f"has a 'multipleOf' of {step}, with more digits than {MULTIPLE_MAX} has")
        if step == int(step) and schema.get("type") == "number":
            schema["type"] = (
                "integer"  # as all multiples are; with a fraction of zeros some readers round them
            )
    for key, inwards in _BOUNDS.items():
        bound = schema.get(key)
        if isinstance(bound, int | float) and abs(bound) > EXACT_MAX:
            schema[key] = _rounded(bound, inwards)


def _rounded(bound: float, inwards: float) -> float:
    """A float at it, or next to it on the side where numbers are allowed."""
    if bound * inwards < 0:  # wide: a narrower one does for all that fits 64 bits
        bound = max(-BOUND_MAX, min(bound, BOUND_MAX))
    if abs(bound) > BOUND_MAX:
        raise SchemaError(f"has a bound of {bound}, beyond which there are no numbers of 64 bits")
    near = float(bound)
    is_outside = near < bound if inwards > 0 else near > bound
    return math.nextafter(near, inwards) if is_outside else near


def _are_disjoint(options: object, root: Schema) -> bool:
    """Whether no value fits two of them, by a property that all require and whose constants differ.

    llguidance finds that out as well, but for options that are references, as generators of schemas for
    tagged unions write them.
    """
    if not isinstance(options, list):
        return False
    found = [resolved(option, root) for option in options]
    objects = [one for one in found if isinstance(one, dict) and one.get("type") == "object"]
    if len(objects) < len(found) or not objects:
        return False
    shared = set.intersection(*({*map(str, _items(one.get("required")))} for one in objects))
    return any(_tells_apart(name, objects, root) for name in sorted(shared))


def _tells_apart(name: str, objects: list[Schema], root: Schema) -> bool:
    tags: list[str] = []
    for one in objects:
        listed = one.get("properties")
        tag = resolved(listed.get(name), root) if isinstance(listed, dict) else None
        if not isinstance(tag, dict):
            return False
        values = [tag["const"]] if "const" in tag else _items(tag.get("enum"))
        found = [value for value in values if isinstance(value, str)]
        if not found or len(found) < len(values):
            return False
        tags += found
    return len(tags) == len({*tags})
