"""Validation of JSON schemas before compilation. Pure.

llguidance refuses unknown keywords by name. It enforces some others only loosely, or at an unacceptable cost.
Such schemas are rewritten here if that only makes them stricter, and refused otherwise. So all generated JSON
is valid by the whole schema; a `Relaxation` drops what would be refused, and names it. `format` is an
annotation in JSON Schema: those that llguidance knows are enforced, all others are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from worker.grammars.numbers import EXACT_MAX, is_read_exactly, with_exact_bounds
from worker.grammars.patterns import UNWRITTEN, check_combined, check_pattern, with_plain_names
from worker.grammars.references import (
    Schema,
    SchemaError,
    entries,
    items,
    looked_up,
    nodes,
    without_endless_values,
)

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
OPTION_TYPES = "types beside $ref in oneOf"
"""Stands in `Relaxation.dropped` for those that are written here, to compare the options."""
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a non-negative integer"}


@dataclass(slots=True)
class Relaxation:
    """What is not enforced of a schema that may be relaxed.

    `dropped`: the keywords to drop wherever they occur. `keywords`: those that were dropped anywhere.
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
    dropped = relaxation.dropped if relaxation else frozenset[str]()
    count = sum(len(entries(node.get("patternProperties"))) for node in nodes(root))
    if count > ALL_PATTERN_PROPERTIES_MAX and "patternProperties" not in dropped:
        message = f"has more than {ALL_PATTERN_PROPERTIES_MAX} 'patternProperties'"
        raise SchemaError(message, "patternProperties")
    mended = _Mender(root, relaxation).mended(root, 0)
    if mended is False:
        raise SchemaError("has a 'not' that allows nothing")
    if mended is True:
        return {}
    if "pattern" not in dropped:
        check_combined(root)
    return without_endless_values(mended)


class _Mender:
    def __init__(self, root: Schema, relaxation: Relaxation | None) -> None:
        self._root = root
        self._relaxation = relaxation
        self._compares = relaxation is None or OPTION_TYPES not in relaxation.dropped
        references = (node.get("$ref") for node in nodes(root))
        self._targets = {id(looked_up(to, root)) for to in references if isinstance(to, str)}

    def mended(self, schema: Any, depth: int) -> Any:
        """Return a schema as llguidance enforces it, with all those within it. Raises `SchemaError`."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError("contains a schema that is not an object")
        if schema.get("not", False) in ({}, True):
            return False
        schema = self._enforceable(schema)
        mended = {key: self._within(key, value, depth + 1) for key, value in schema.items()}
        if "type" in mended and self._type_of(mended) == mended["type"]:
            del mended["type"]  # where references are circular, llguidance takes no constraint beside them
        if isinstance(mended.get("$ref"), str):
            mended["$ref"] = _NOT_IN_URI.sub(lambda found: quote(found[0]), mended["$ref"])
        if "prefixItems" in mended:
            mended.pop("additionalItems", None)  # from older drafts; llguidance would ignore `prefixItems`
        if "oneOf" in mended and self._compares:
            mended["oneOf"] = [*map(self._resolved_option, mended["oneOf"])]
        return _without_false_options(mended)

    def _within(self, key: str, value: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise SchemaError(f"is nested more than {DEPTH_MAX} levels deep")
        if key in _NAMED and isinstance(value, dict):
            return {name: self.mended(part, depth) for name, part in value.items()}
        if key in _MANY and isinstance(value, list):
            return [self.mended(part, depth) for part in value]
        if key in _ONE:
            return self.mended(value, depth)
        return value if key in _APPLIED else self._elsewhere(value, depth)

    def _elsewhere(self, node: Any, depth: int) -> Any:
        """Mend the targets of references in places that hold no schemas, as OpenAPI's components."""
        if isinstance(node, list):
            return [self._within("", part, depth + 1) for part in node]
        if not isinstance(node, dict):
            return node
        if id(node) in self._targets:
            return self.mended(node, depth)
        return {name: self._within("", part, depth + 1) for name, part in node.items()}

    def _type_of(self, schema: Schema) -> object:
        """Return the type that the schema behind a reference has itself; None if unknown."""
        reference = schema.get("$ref")
        found = looked_up(reference, self._root) if isinstance(reference, str) else None
        return found.get("type") if isinstance(found, dict) and "$ref" not in found else None

    def _resolved_option(self, option: Any) -> Any:
        """Repeat the type of an object beside a reference to it: llguidance then resolves the reference, and
        may find that no value matches two of the options, as of a tagged union."""
        if isinstance(option, dict) and option.keys() == {"$ref"} and self._type_of(option) == "object":
            return option | {"type": "object"}
        return option

    def _enforceable(self, schema: Schema) -> Schema:
        """Return what can be enforced of one schema, apart from the schemas within it."""
        schema = {key: value for key, value in schema.items() if _has_effect(key, value)}
        _check_kinds(schema)
        relaxation = self._relaxation or Relaxation()
        for keyword in sorted(relaxation.dropped):
            schema = relaxation.drop(schema, keyword)
        if "patternProperties" not in relaxation.dropped:
            schema = with_plain_names(schema, self._root)
        if schema.get("format") in ("date", "date-time"):
            schema = {"pattern": "^0{0,3}[1-9]"} | schema  # there is no year 0
        while True:
            try:
                _check(schema)
                return with_exact_bounds(_in_order(schema))
            except SchemaError as error:
                if self._relaxation is None or not error.keyword:
                    raise
                schema = relaxation.drop(schema, error.keyword)


def _without_false_options(schema: Schema) -> object:
    """Drop options that allow nothing, as zod 3 writes one for an optional property."""
    for key in {"anyOf", "oneOf"} & schema.keys():
        options = [option for option in items(schema[key]) if option is not False]
        if schema.keys() == {key} and len(options) == 1:
            return options[0]
        if options:
            schema = schema | {key: options}
    return schema


def _in_order(schema: Schema) -> Schema:
    """Put other schemas last: llguidance reads `additionalProperties` apart from the patterns before them."""
    if "patternProperties" not in schema:
        return schema
    return {key: schema[key] for key in sorted(schema, key=_APPLIED.__contains__)}


def _has_effect(key: str, value: object) -> bool:
    if key == "format" and isinstance(value, str):
        return value in FORMATS
    return _WITHOUT_EFFECT.get(key, ...) != value


def _check_kinds(schema: Schema) -> None:
    for kind, keywords in _KINDS.items():
        for keyword in keywords & schema.keys():
            _check_kind(keyword, schema[keyword], kind)


def _check(schema: Schema) -> None:
    """Check limits of keywords, and refuse what llguidance would enforce only loosely."""
    _check_object(schema)
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
