"""Random satisfiable JSON schemas, by Hypothesis."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_WORDS = st.sampled_from(["a", "name", "tags", "é", "a b", 'q"q', "x-1", "$", "列", "line\nend"])
_PATTERNS = ["^[A-Z]{2}-[0-9]{1,4}$", "b+", "^(yes|no)$", r"^\d{3}$", "^a.*z$", r"[\w.]+@[a-z]+", "^$|^x"]
_FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]


_TINY = st.sampled_from([1e-9, -1e-9, 0.001, 5e-324, 1000.3])


@st.composite
def _bounded(draw: st.DrawFn, kind: str) -> Schema:
    """Draw a range, often narrower than 1, with a value at or beside its lower end."""
    numbers = st.integers(-1000, 1000) | st.integers(-3, 3)
    low = draw(numbers if kind == "integer" else numbers | numbers.map(lambda n: n / 4) | _TINY)
    width = draw(st.sampled_from([900, 30, 1, 0.5, 2**-20, 1e-9]))
    schema: Schema = {"type": kind}
    match draw(st.integers(0, 2)):
        case 1:
            schema["minimum"] = low
        case 2:
            schema["exclusiveMinimum"] = low - draw(st.sampled_from([1, 0.5])) if kind == "integer" else low
    match draw(st.integers(0, 2)):
        case 1:
            schema["maximum"] = low + width
        case 2:
            schema["exclusiveMaximum"] = low + width
    if width >= 30 and draw(st.integers(0, 2)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 5, 7] if kind == "integer" else [1, 5, 0.5, 0.25]))
    return schema


@st.composite
def _string(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string"}
    match draw(st.integers(0, 3)):
        case 1:
            schema["pattern"] = draw(st.sampled_from(_PATTERNS))
        case 2:
            schema["format"] = draw(st.sampled_from(_FORMATS))
        case 3:
            least = draw(st.integers(0, 5))
            schema |= {"minLength": least, "maxLength": least + draw(st.integers(0, 6))}
    return schema


_CONSTANTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.integers(-4000, 4000).map(lambda n: n / 8),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8),
    st.sampled_from(["\n", "\t\r", '"', "\\", "a/b"]),
)
_VALUES = st.recursive(
    _CONSTANTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=5,
)
_KINDS: list[Schema] = [{"type": k} for k in ("boolean", "null", ["integer", "null"], ["string", "null"])]
_LEAVES = st.one_of(
    st.sampled_from(_KINDS),
    _bounded("integer"),
    _bounded("number"),
    _string(),
    st.builds(lambda value: {"const": value}, _VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=5)),
)


_NAME_PATTERNS = ["^z[0-9]+$", "^(a|tags)$", "^[$列]$", "^na?me$|^x-1$", "a", "^é", "^.$", r"^\w+\.$", ".*"]


@st.composite
def _array(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    schema: Schema = {"type": "array", "items": draw(inner), "minItems": least}
    schema["maxItems"] = least + draw(st.integers(0, 3))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    return schema


@st.composite
def _object(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_WORDS, inner, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    match draw(st.integers(0, 4)):
        case 0:
            schema["additionalProperties"] = draw(inner)
        case 1:
            pattern = draw(st.sampled_from(_NAME_PATTERNS))
            is_free = not any(re.search(pattern, name) for name in properties)
            schema["patternProperties"] = {pattern: draw(inner) if is_free else {}}
            schema["additionalProperties"] = draw(st.sampled_from([False, True]))
        case 2:
            schema["additionalProperties"] = False
        case 4:
            names = {"enum": sorted({*properties, "x", "y"})}
            rules = [{"type": "string"}, {"$ref": "#/$defs/name"}, names]
            schema |= {"propertyNames": draw(st.sampled_from(rules)), "additionalProperties": draw(inner)}
    return schema


def _composed(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(
        _array(inner),
        _object(inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner),
        st.just({"$ref": "#/$defs/node"}),
        st.just({"$ref": "#/$defs/leaf"}),
    )


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Draw an object's schema with recursive definitions, one of them without a finite value."""
    inner = st.recursive(_LEAVES, _composed, max_leaves=6)
    node = {
        "type": "object",
        "properties": {
            "value": draw(_LEAVES),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/endless"}, {"type": "null"}]},
            "more": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            "never": {"$ref": "#/$defs/endless"},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    root = draw(_object(inner))
    endless = {"type": "array", "prefixItems": [{"$ref": "#/$defs/endless"}], "minItems": 1}
    definitions = {"node": node, "leaf": draw(_LEAVES), "endless": endless, "name": {"type": "string"}}
    return root | {"title": "made up", "$defs": definitions}
