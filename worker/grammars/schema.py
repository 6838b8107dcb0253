"""Validation of JSON schemas before compilation, and the style of generated JSON. Pure.

llguidance refuses unknown keywords by name. It enforces some others only loosely, or at an unacceptable cost.
Such schemas are rewritten here if that only makes them stricter, and refused otherwise. So all generated JSON
is valid by the whole schema.
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
"""Maximum nesting of schemas: llguidance's parser accepts 128 levels of JSON."""
PATTERN_PROPERTIES_MAX = 64
"""Maximum in one object: they are compared pairwise, which takes more than a second for 200."""
OPTIONAL_MAX = 400
"""Maximum optional properties of one object: with 500, llguidance exceeds its limits while enforcing them."""
PATTERNS_MAX = 4
"""Maximum of `pattern`s that one string must match: their automata are multiplied, at any cost in memory."""
MULTIPLE_MAX = 10_000
"""Maximum of `multipleOf` without its decimal point: the automaton that divides has as many states."""
EXACT_MAX = 2**53
"""Largest range in which every integer is a float64, which llguidance computes with."""
BOUND_MAX = 9_200_000_000_000_000_000
"""Largest numeric bound that llguidance accepts, slightly below the signed 64-bit limit."""

WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
"""White space between JSON tokens, at most once: one or two blanks, or a line break and indentation. This
allows pretty-printing; without a bound small models fill their whole answer with line breaks."""

_WRITING = {
    "whitespace_pattern": WHITE_SPACE,
    "lenient": False,
    "coerce_one_of": False,
    # No \\uXXXX: `"\\u0061"` equals `"a"`, which would permit duplicate keys and bypass patterns.
    "json_allowed_escapes": 'nrbtf\\"',
}
# Characters that JSON can write only as \\uXXXX. llguidance would drop them from constants.
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
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a non-negative integer"}
_BOUNDS = {
    "minimum": math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "exclusiveMaximum": -math.inf,
}

Schema = dict[str, Any]


class SchemaError(Exception):
    """A schema is not supported. The message is a sentence without its subject, the schema."""


def parse(text: str | bytes) -> Schema:
    """Parse and check a schema. Raises `SchemaError`."""
    if len(text) > SCHEMA_BYTES_MAX:
        raise SchemaError(f"is {len(text)} bytes long; the limit is {SCHEMA_BYTES_MAX}")
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise SchemaError(f"is not JSON: {error}") from None
    return checked(schema)


def checked(schema: object) -> Schema:
    """Rewrite a schema so that llguidance enforces it exactly. Raises `SchemaError`."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("is not an object" if schema is not False else "is 'false', which allows nothing")
    root = {key: value for key, value in schema.items() if key != "x-guidance"}
    mended: Schema = _mended(root, root, 0)
    _check_patterns(root)
    return mended


def spelled(schema: Mapping[str, Any]) -> str:
    """Serialize a schema, together with the style of generated JSON."""
    return json.dumps({**schema, "x-guidance": _WRITING}, ensure_ascii=False)


def within(schema: Mapping[str, Any], part: object) -> object:
    """Return a part of a schema, with the definitions it may refer to."""
    if not isinstance(part, dict):
        return part
    return {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema} | part


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Resolve a reference within the same schema; return anything else unchanged."""
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
        raise SchemaError("contains a schema that is not an object")
    if depth > DEPTH_MAX:
        raise SchemaError(f"is nested more than {DEPTH_MAX} levels deep")
    _check(schema)
    mended = {key: _within(key, value, root, depth + 1) for key, value in schema.items()}
    if "prefixItems" in mended:
        mended.pop("additionalItems", None)  # from older drafts; llguidance would ignore `prefixItems`
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
    """Check types and limits of keywords, and refuse what llguidance would enforce only loosely."""
    for kind, keywords in _KINDS.items():
        for keyword in keywords & schema.keys():
            _check_kind(keyword, schema[keyword], kind)
    _check_object(schema)
    for constant in _scalars([schema.get("enum"), schema.get("const")]):
        _check_constant(constant)
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        if found := _UNWRITTEN_IN_PATTERN.search(_CLASS.sub("", pattern)):
            raise SchemaError(f"contains the control character {found[0]!r} in a 'pattern'")


def _check_patterns(root: Schema) -> None:
    """Refuse values that must match too many patterns at once, by `allOf` and `$ref`."""
    counts: dict[int, int] = {}
    entered: set[int] = set()
    stack: list[object] = [root]
    while stack:  # not recursive: chains of references may be long
        node = stack[-1]
        if id(node) in counts or not isinstance(node, dict | list):
            stack.pop()
        elif id(node) not in entered:
            entered.add(id(node))
            stack += [*(node.values() if isinstance(node, dict) else node), *_conjuncts(node, root)]
        else:
            own = isinstance(node, dict) and isinstance(node.get("pattern"), str)
            counts[id(node)] = own + sum(counts.get(id(part), 0) for part in _conjuncts(node, root))
            stack.pop()
            if counts[id(node)] > PATTERNS_MAX:
                raise SchemaError(f"combines more than {PATTERNS_MAX} 'pattern's by 'allOf' or '$ref'")


def _conjuncts(node: object, root: Schema) -> list[object]:
    """Return the schemas that a value must match too, besides the keywords of `node`."""
    if not isinstance(node, dict):
        return []
    reference = node.get("$ref")
    return [
        *_items(node.get("allOf")),
        *([_looked_up(reference, root)] if isinstance(reference, str) else []),
    ]


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
    # Unlisted names may be generated twice, which then count as one property.
    if fewest > 1 + len(required):
        raise SchemaError("has a 'minProperties' greater than the number of required properties plus one")


def _check_constant(constant: object) -> None:
    if isinstance(constant, int) and abs(constant) > EXACT_MAX:
        raise SchemaError(
            f"contains the number {constant} in 'const' or 'enum', which a 64-bit float cannot represent"
        )
    if isinstance(constant, str) and (found := _UNWRITTEN.search(constant)):
        raise SchemaError(f"contains the control character {found[0]!r} in 'const' or 'enum'")


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
            raise SchemaError(
                f"has a 'multipleOf' of {step}; without its decimal point it must be at most {MULTIPLE_MAX}"
            )
        if step == int(step) and schema.get("type") == "number":
            schema["type"] = "integer"  # all multiples are integers; some parsers round numbers like 1.0
    for key, inwards in _BOUNDS.items():
        bound = schema.get(key)
        if isinstance(bound, int | float) and abs(bound) > EXACT_MAX:
            schema[key] = _rounded(bound, inwards)


def _rounded(bound: float, inwards: float) -> float:
    """Round a bound to a float, towards the allowed side."""
    if bound * inwards < 0:  # a wide bound can be narrowed to the range of 64 bits
        bound = max(-BOUND_MAX, min(bound, BOUND_MAX))
    if abs(bound) > BOUND_MAX:
        raise SchemaError(f"has a bound of {bound}, which no 64-bit number satisfies")
    near = float(bound)
    is_outside = near < bound if inwards > 0 else near > bound
    return math.nextafter(near, inwards) if is_outside else near


def _are_disjoint(options: object, root: Schema) -> bool:
    """Whether no value matches two options, because all require a property with different constants.

    llguidance detects this too, except for options that are references, as generators write tagged unions.
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
