"""Validation of JSON schemas before compilation, and the style of generated JSON. Pure.

llguidance refuses unknown keywords by name. It enforces some others only loosely, or at an unacceptable cost.
Such schemas are rewritten here if that only makes them stricter, and refused otherwise. So all generated JSON
is valid by the whole schema; a `Relaxation` drops what would be refused, and names it. `format` is an
annotation in JSON Schema: those that llguidance knows are enforced, all others are dropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Values of `format` that are enforced."""
SCHEMA_BYTES_MAX = 256 * 2**10
DEPTH_MAX = 100
"""Maximum nesting of schemas: llguidance's parser accepts 128 levels of JSON."""
PATTERN_PROPERTIES_MAX = 64
"""Maximum in one object: they are compared pairwise, which takes more than a second for 200."""
OPTIONAL_MAX = 400
"""Maximum optional properties of one object: with 500, llguidance exceeds its limits while enforcing them."""
PLACES_MAX = 500
"""Maximum of referenced places that hold no schemas by themselves: the objects around each are copied."""
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
_ESCAPE_OR_CLASS = re.compile(rf"\\.|{_CLASS.pattern}")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_ONE = ("additionalProperties", "additionalItems", "items")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *_DEFINITIONS)
_WITHOUT_EFFECT: Mapping[str, object] = {"uniqueItems": False, "dependencies": {}, "not": False}
_DEPENDENTS: Mapping[str, tuple[str, ...]] = {
    "patternProperties": ("additionalProperties",),
    "properties": ("additionalProperties",),
}
"""Keywords whose meaning depends on another one: without it, they would allow less than the schema does."""
_PLACES = frozenset(("", *_ONE, *_MANY, *_NAMED))
_KINDS: Mapping[type, set[str]] = {
    dict: {*_NAMED},
    list: {"required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"},
    str: {"pattern", "format", "$ref"},
    int: {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"},
}
_CONSTRAINTS = {"type", "const", "multipleOf"}.union(*_KINDS.values(), _ONE) - {"$ref", *_DEFINITIONS}
REFERENCE_SIBLINGS = "constraints beside $ref"
"""Stands for all of them in `Relaxation.dropped`. Where references are circular, llguidance takes none."""
COUNTS = ("minProperties", "maxProperties")
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a non-negative integer"}
_BOUNDS = {
    "minimum": math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "exclusiveMaximum": -math.inf,
}

Schema = dict[str, Any]


class SchemaError(Exception):
    """A schema is not supported. The message is a sentence without its subject, the schema.

    `keyword`: the one that cannot be enforced; empty if the schema is malformed or too large.
    """

    def __init__(self, message: str, keyword: str = "") -> None:
        super().__init__(message)
        self.keyword = keyword


@dataclass(slots=True)
class Relaxation:
    """What is not enforced of a schema that may be relaxed.

    `dropped`: keywords to drop wherever they are. `keywords`: those that were dropped anywhere.
    """

    dropped: frozenset[str] = frozenset()
    keywords: set[str] = field(default_factory=set)

    def drop(self, schema: Schema, keyword: str) -> Schema:
        """Return the schema without a keyword and those that depend on it."""
        gone = {keyword, *_DEPENDENTS.get(keyword, ())} & schema.keys()
        if keyword == REFERENCE_SIBLINGS:
            gone = _CONSTRAINTS & schema.keys() if "$ref" in schema else set()
        self.keywords |= gone
        return {key: value for key, value in schema.items() if key not in gone}


def parse(text: str | bytes, relaxation: Relaxation | None = None) -> Schema:
    """Parse and check a schema. `relaxation`: see `checked`. Raises `SchemaError`."""
    if len(text) > SCHEMA_BYTES_MAX:
        raise SchemaError(f"is {len(text)} bytes long; the limit is {SCHEMA_BYTES_MAX}")
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise SchemaError(f"is not JSON: {error}") from None
    return checked(schema, relaxation)


def checked(schema: object, relaxation: Relaxation | None = None) -> Schema:
    """Rewrite a schema so that llguidance enforces it exactly. Raises `SchemaError`.

    `relaxation`: drop what cannot be enforced, and record it there; None: refuse it.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("is not an object" if schema is not False else "is 'false', which allows nothing")
    root = {key: value for key, value in schema.items() if key != "x-guidance"}
    mended: Schema = _mended(root, root, 0, relaxation)
    for names in _places_elsewhere(root):
        target = _mended(_looked_up("/".join(("#", *names)), root), root, 0, relaxation)
        mended = _replaced(mended, names, target)
    if relaxation is None or "pattern" not in relaxation.dropped:
        _check_patterns(root)
    return mended


def spelled(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Serialize a schema, together with the style of generated JSON.

    `lenient`: llguidance ignores, with a warning, keywords that it does not implement.
    """
    return json.dumps({**schema, "x-guidance": _WRITING | {"lenient": lenient}}, ensure_ascii=False)


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


def _places_elsewhere(root: Schema) -> list[tuple[str, ...]]:
    """Return the pointers of all references to places that hold no schemas by themselves, as OpenAPI's
    `#/components/schemas/…`, without those within another one. Raises `SchemaError` if there are too many."""
    found: dict[tuple[str, ...], None] = {}
    stack: list[object] = [root]
    while stack:  # not recursive: values that are no schemas may be nested deeply
        node = stack.pop()
        if isinstance(node, dict):
            names = tuple(str(node.get("$ref", "")).split("/"))
            if names[0] == "#" and len(names) > 1 and names[1] not in _PLACES:
                found[names[1:]] = None
        stack += node.values() if isinstance(node, dict) else _items(node)
    if len(found) > PLACES_MAX:
        raise SchemaError(f"refers to more than {PLACES_MAX} places outside of '$defs'")
    return [
        names
        for names in found
        if isinstance(_looked_up("/".join(("#", *names)), root), dict)
        and not any(names[:cut] in found and names[cut] in _PLACES for cut in range(1, len(names)))
    ]


def _replaced(node: Any, names: Sequence[str], value: object) -> Any:
    """Return a copy of nested objects with another value at a pointer."""
    if not names or not isinstance(node, dict):
        return value if not names else node
    name = names[0].replace("~1", "/").replace("~0", "~")
    return node | {name: _replaced(node.get(name), names[1:], value)}


def _mended(schema: Any, root: Schema, depth: int, relaxation: Relaxation | None) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError("contains a schema that is not an object")
    if depth > DEPTH_MAX:
        raise SchemaError(f"is nested more than {DEPTH_MAX} levels deep")
    schema = _enforceable(schema, relaxation)
    mended = {key: _within(key, value, root, depth + 1, relaxation) for key, value in schema.items()}
    if "type" in mended and _type_of(mended.get("$ref"), root) == mended["type"]:
        del mended["type"]  # where references are circular, llguidance takes no constraint beside them
    if "prefixItems" in mended:
        mended.pop("additionalItems", None)  # from older drafts; llguidance would ignore `prefixItems`
    if "oneOf" in mended and "anyOf" not in mended and _are_disjoint(mended["oneOf"], root):
        mended = {"anyOf" if key == "oneOf" else key: value for key, value in mended.items()}
    return mended


def _type_of(reference: object, root: Schema) -> object:
    """Return the type that the schema behind a reference has itself; None if unknown."""
    found = _looked_up(reference, root) if isinstance(reference, str) else None
    return found.get("type") if isinstance(found, dict) and "$ref" not in found else None


def _enforceable(schema: Schema, relaxation: Relaxation | None) -> Schema:
    """Return what can be enforced of one schema, apart from the schemas within it. Raises `SchemaError`."""
    if relaxation is not None:
        for keyword in relaxation.dropped:
            schema = relaxation.drop(schema, keyword)
    while True:
        mended = {key: value for key, value in schema.items() if _has_effect(key, value)}
        try:
            _check(mended, is_strict=relaxation is None)
            _mend_numbers(mended)
        except SchemaError as error:
            if relaxation is None or not error.keyword:
                raise
            schema = relaxation.drop(schema, error.keyword)
        else:
            return mended


def _has_effect(key: str, value: object) -> bool:
    if key == "format" and isinstance(value, str):
        return value in FORMATS
    return _WITHOUT_EFFECT.get(key, ...) != value


def _within(key: str, value: Any, root: Schema, depth: int, relaxation: Relaxation | None) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _mended(part, root, depth, relaxation) for name, part in value.items()}
    if key in _MANY and isinstance(value, list):
        return [_mended(part, root, depth, relaxation) for part in value]
    return _mended(value, root, depth, relaxation) if key in _ONE else value


def _check(schema: Schema, *, is_strict: bool) -> None:
    """Check types and limits of keywords, and refuse what llguidance would enforce only loosely."""
    for kind, keywords in _KINDS.items():
        for keyword in keywords & schema.keys():
            _check_kind(keyword, schema[keyword], kind)
    _check_object(schema)
    if not is_strict:
        _check_counts(schema)
    for keyword in ("enum", "const"):
        for constant in _scalars([schema.get(keyword)]):
            _check_constant(constant, keyword)
    _check_pattern(schema.get("pattern", ""), "pattern")
    for pattern in schema.get("patternProperties", ()):
        _check_pattern(pattern, "patternProperties")


def _check_pattern(pattern: str, keyword: str) -> None:
    if found := _UNWRITTEN_IN_PATTERN.search(_CLASS.sub("", pattern)):
        raise SchemaError(f"contains the control character {found[0]!r} in a '{keyword}'", keyword)
    if found := _LOOK_AROUND.search(_ESCAPE_OR_CLASS.sub("", pattern)):
        raise SchemaError(f"has a '{keyword}' with the look-around '{found[0]}'", keyword)


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
                raise SchemaError(
                    f"combines more than {PATTERNS_MAX} 'pattern's by 'allOf' or '$ref'",
                    "pattern",
                )


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
        message = f"has more than {PATTERN_PROPERTIES_MAX} 'patternProperties' in one object"
        raise SchemaError(message, "patternProperties")
    if len(schema.get("properties", ())) - len(required) > OPTIONAL_MAX:
        raise SchemaError(f"has more than {OPTIONAL_MAX} optional 'properties' in one object", "properties")
    # Unlisted names may be generated twice, which then count as one property.
    if fewest > 1 + len(required):
        message = "has a 'minProperties' greater than the number of required properties plus one"
        raise SchemaError(message, "minProperties")


def _check_counts(schema: Schema) -> None:
    """Refuse numbers of properties that a lenient llguidance would apply only to those that are not listed.

    Otherwise it refuses them itself, and knows what `allOf` combines.
    """
    required = {*schema.get("required", ())}
    fewest, most = (schema.get(key, len(required)) - len(required) for key in COUNTS)
    if not schema.get("properties", {}).keys() - required:
        return
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if "maxProperties" in schema and not (is_closed and most == 1 and fewest <= 1):
        raise SchemaError("has a 'maxProperties' beside optional 'properties'", "maxProperties")
    if fewest > 0 and not (is_closed and fewest == 1):
        raise SchemaError("has a 'minProperties' beside optional 'properties'", "minProperties")


def _check_constant(constant: object, keyword: str) -> None:
    if isinstance(constant, int) and abs(constant) > EXACT_MAX:
        message = f"contains the number {constant} in '{keyword}', which a 64-bit float cannot represent"
        raise SchemaError(message, keyword)
    if isinstance(constant, str) and (found := _UNWRITTEN.search(constant)):
        raise SchemaError(f"contains the control character {found[0]!r} in '{keyword}'", keyword)


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
            message = f"has a 'multipleOf' of {step}; without its decimal point it must be at most"
            raise SchemaError(f"{message} {MULTIPLE_MAX}", "multipleOf")
        if step == int(step) and schema.get("type") == "number":
            schema["type"] = "integer"  # all multiples are integers; some parsers round numbers like 1.0
    for key, inwards in _BOUNDS.items():
        bound = schema.get(key)
        if isinstance(bound, int | float) and abs(bound) > EXACT_MAX:
            schema[key] = _rounded(bound, inwards, key)


def _rounded(bound: float, inwards: float, keyword: str) -> float:
    """Round a bound to a float, towards the allowed side."""
    if bound * inwards < 0:  # a wide bound can be narrowed to the range of 64 bits
        bound = max(-BOUND_MAX, min(bound, BOUND_MAX))
    if abs(bound) > BOUND_MAX:
        raise SchemaError(f"has a bound of {bound}, which no 64-bit number satisfies", keyword)
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
