"""Validation of JSON schemas before compilation, and the style of generated JSON. Pure.

llguidance refuses unknown keywords by name. It enforces some others only loosely, or at an unacceptable cost.
Such schemas are rewritten here if that only makes them stricter, and refused otherwise. So all generated JSON
is valid by the whole schema; a `Relaxation` drops what would be refused, and names it. `format` is an
annotation in JSON Schema: those that llguidance knows are enforced, all others are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from worker.grammars.finite import without_endless_values
from worker.grammars.names import with_plain_names
from worker.grammars.numbers import EXACT_MAX, is_read_exactly, with_exact_bounds
from worker.grammars.patterns import UNWRITTEN, check_combined, check_pattern
from worker.grammars.references import Schema, SchemaError, entries, items, looked_up, nodes, resolved

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Values of `format` that are enforced."""
SCHEMA_BYTES_MAX = 256 * 2**10
DEPTH_MAX = 100
"""Maximum nesting of schemas: llguidance's parser accepts 128 levels of JSON."""
ALL_PATTERN_PROPERTIES_MAX = 500
"""Maximum in a schema: each may stand for `names.NAMES_MAX` properties."""
PATTERN_PROPERTIES_MAX = 64
"""Maximum in one object: they are compared pairwise, which takes more than a second for 200."""
OPTIONAL_MAX = 400
"""Maximum optional properties of one object: with 500, llguidance exceeds its limits while enforcing them."""
PLACES_MAX = 500
"""Maximum of referenced places that hold no schemas by themselves: the objects around each are copied."""

WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
"""White space between JSON tokens, at most once: one or two blanks, or a line break and indentation. This
allows pretty-printing; without a bound small models fill their whole answer with line breaks."""

_WRITING = {
    "whitespace_pattern": WHITE_SPACE,
    "coerce_one_of": False,
    # No \\uXXXX: `"\\u0061"` equals `"a"`, which would permit duplicate keys and bypass patterns.
    "json_allowed_escapes": 'nrbtf\\"',
}
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
_NOT_IN_URI = re.compile(r"[ \[\]{}<>\"\\^`|]")
"""Characters that llguidance refuses in a reference, such as those of a generic type's name."""
_APPLIED = frozenset(("const", "enum", "allOf", "anyOf", "oneOf", "$ref"))
REFERENCE_SIBLINGS = "constraints beside $ref"
"""Stands for all of them in `Relaxation.dropped`. Where references are circular, llguidance takes none."""
COUNTS = ("minProperties", "maxProperties")
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a non-negative integer"}
Unenforceable = tuple[str, str]
"""A keyword, and the value's identity: a pattern, or the patterns of names as JSON; empty: any value."""


def _identity(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(sorted(entries(value)))


@dataclass(slots=True)
class Relaxation:
    """What is not enforced of a schema that may be relaxed.

    `dropped`: what to drop. `keywords`: those that were dropped anywhere. `patterns`: those that were kept.
    """

    dropped: frozenset[Unenforceable] = frozenset()
    keywords: set[str] = field(default_factory=set)
    patterns: set[Unenforceable] = field(default_factory=set)

    def applied(self, schema: Schema) -> Schema:
        """Return one schema without what is to be dropped of it."""
        for keyword, value in sorted(self.dropped):
            if not value or value == _identity(schema.get(keyword)):
                schema = self.drop(schema, keyword)
        self.patterns |= {
            (key, _identity(schema[key])) for key in ("pattern", "patternProperties") if key in schema
        }
        return schema

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
    if relaxation is None or ("patternProperties", "") not in relaxation.dropped:
        _check_pattern_properties(root)
    mended = _mended(root, root, 0, relaxation)
    for names in _places_elsewhere(root):
        target = _mended(looked_up("/".join(("#", *names)), root), root, 0, relaxation)
        mended = _replaced(mended, names, target)
    if mended is False:
        raise SchemaError("has a 'not' that allows nothing")
    if mended is True:
        return {}
    if relaxation is None or ("pattern", "") not in relaxation.dropped:
        check_combined(root)
    return without_endless_values(mended)


def _check_pattern_properties(root: Schema) -> None:
    count = sum(len(entries(node.get("patternProperties"))) for node in nodes(root))
    if count > ALL_PATTERN_PROPERTIES_MAX:
        message = f"has more than {ALL_PATTERN_PROPERTIES_MAX} 'patternProperties'"
        raise SchemaError(message, "patternProperties")


def spelled(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Serialize a schema, together with the style of generated JSON.

    `lenient`: llguidance ignores, with a warning, keywords that it does not implement.
    """
    return json.dumps({**schema, "x-guidance": _WRITING | {"lenient": lenient}}, ensure_ascii=False)


def _places_elsewhere(root: Schema) -> list[tuple[str, ...]]:
    """Return the pointers of all references to places that hold no schemas by themselves, as OpenAPI's
    `#/components/schemas/…`, without those within another one. Raises `SchemaError` if there are too many."""
    found: dict[tuple[str, ...], None] = {}
    for node in nodes(root):
        names = tuple(unquote(str(node.get("$ref", ""))).split("/"))
        if names[0] == "#" and len(names) > 1 and names[1] not in _PLACES:
            found[names[1:]] = None
    if len(found) > PLACES_MAX:
        raise SchemaError(f"refers to more than {PLACES_MAX} places outside of '$defs'")
    return [
        names
        for names in found
        if isinstance(looked_up("/".join(("#", *names)), root), dict)
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
    if schema.get("not", False) in ({}, True):
        return False
    schema = _enforceable(schema, root, relaxation)
    mended = {key: _within(key, value, root, depth + 1, relaxation) for key, value in schema.items()}
    if "type" in mended and _type_of(mended.get("$ref"), root) == mended["type"]:
        del mended["type"]  # where references are circular, llguidance takes no constraint beside them
    if isinstance(mended.get("$ref"), str):
        mended["$ref"] = _NOT_IN_URI.sub(lambda found: quote(found[0]), mended["$ref"])
    if "prefixItems" in mended:
        mended.pop("additionalItems", None)  # from older drafts; llguidance would ignore `prefixItems`
    if "oneOf" in mended and "anyOf" not in mended and _are_disjoint(mended["oneOf"], root):
        mended = {"anyOf" if key == "oneOf" else key: value for key, value in mended.items()}
    return _without_false_options(mended)


def _without_false_options(schema: Schema) -> object:
    """Drop options that allow nothing, as zod 3 writes one for an optional property."""
    for key in {"anyOf", "oneOf"} & schema.keys():
        options = [option for option in items(schema[key]) if option is not False]
        if schema.keys() == {key} and len(options) == 1:
            return options[0]
        if options:
            schema = schema | {key: options}
    return schema


def _type_of(reference: object, root: Schema) -> object:
    """Return the type that the schema behind a reference has itself; None if unknown."""
    found = looked_up(reference, root) if isinstance(reference, str) else None
    return found.get("type") if isinstance(found, dict) and "$ref" not in found else None


def _enforceable(schema: Schema, root: Schema, relaxation: Relaxation | None) -> Schema:
    """Return what can be enforced of one schema, apart from the schemas within it. Raises `SchemaError`."""
    schema = {key: value for key, value in schema.items() if _has_effect(key, value)}
    _check_kinds(schema)
    schema = with_plain_names(schema, root)
    if schema.get("format") in ("date", "date-time"):
        schema = {"pattern": "^0{0,3}[1-9]"} | schema  # there is no year 0
    if relaxation is None:
        _check(schema, is_strict=True)
        return with_exact_bounds(_in_order(schema))
    schema = relaxation.applied(schema)
    while True:
        try:
            _check(schema, is_strict=False)
            return with_exact_bounds(_in_order(schema))
        except SchemaError as error:
            if not error.keyword:
                raise
            schema = relaxation.drop(schema, error.keyword)


def _in_order(schema: Schema) -> Schema:
    """Put other schemas last: llguidance reads `additionalProperties` apart from the patterns before them."""
    if "patternProperties" not in schema:
        return schema
    return {key: schema[key] for key in sorted(schema, key=_APPLIED.__contains__)}


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


def _check_kinds(schema: Schema) -> None:
    for kind, keywords in _KINDS.items():
        for keyword in keywords & schema.keys():
            _check_kind(keyword, schema[keyword], kind)


def _check(schema: Schema, *, is_strict: bool) -> None:
    """Check limits of keywords, and refuse what llguidance would enforce only loosely."""
    _check_object(schema)
    if not is_strict:
        _check_counts(schema)
    for keyword in ("enum", "const"):
        for constant in _scalars([schema.get(keyword)]):
            _check_constant(constant, keyword)
    check_pattern(schema.get("pattern", ""), "pattern")
    for pattern in schema.get("patternProperties", ()):
        check_pattern(pattern, "patternProperties")


def _check_kind(keyword: str, value: object, kind: type) -> None:
    is_negative = isinstance(value, int) and value < 0
    if not isinstance(value, kind) or isinstance(value, bool) or is_negative:
        raise SchemaError(f"has a '{keyword}' that is not {_NAMES[kind]}")
    if keyword == "required" and not all(isinstance(name, str) for name in items(value)):
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
    if isinstance(constant, float) and not is_read_exactly(constant):
        message = f"contains the number {constant} in '{keyword}', which has too many digits"
        raise SchemaError(message, keyword)
    if isinstance(constant, str) and (found := UNWRITTEN.search(constant)):
        raise SchemaError(f"contains the control character {found[0]!r} in '{keyword}'", keyword)


def _scalars(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, dict):
            yield from _scalars(value.values())
        elif isinstance(value, list):
            yield from _scalars(value)
        else:
            yield value


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
    shared = set.intersection(*({*map(str, items(one.get("required")))} for one in objects))
    return any(_tells_apart(name, objects, root) for name in sorted(shared))


def _tells_apart(name: str, objects: list[Schema], root: Schema) -> bool:
    tags: list[str] = []
    for one in objects:
        listed = one.get("properties")
        tag = resolved(listed.get(name), root) if isinstance(listed, dict) else None
        if not isinstance(tag, dict):
            return False
        values = [tag["const"]] if "const" in tag else items(tag.get("enum"))
        found = [value for value in values if isinstance(value, str)]
        if not found or len(found) < len(values):
            return False
        tags += found
    return len(tags) == len({*tags})
