"""Names of properties: keywords that llguidance lacks for them, written as those that it has. Pure.

A pattern that matches only a few names is written as these names in `properties` where some of them are
listed already: llguidance would leave no name to choose where all of them are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker.grammars.patterns import is_writable
from worker.grammars.references import Schema, entries, items, resolved

NAMES_MAX = 32
"""Maximum number of names that a pattern is replaced with."""
NAME_PATTERN_MAX = 200
"""Maximum characters of such a pattern."""
ANNOTATIONS = frozenset(
    ("title", "description", "$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "examples")
) | {"default", "format", "deprecated"}
"""Keywords without effect on the validity of names."""

_ESCAPE = re.compile(r"\\([^\w\s])")
_CLASS = re.compile(r"\[([^\\^\[\]]+)\]")
_RANGE = re.compile(r"(.)(?:-(.))?", re.DOTALL)
_MAYBE = re.compile(r"([^()|?]|\([^()]*\))\?")
_GROUP = re.compile(r"\(([^()]*)\)")
_NAME = re.compile(r"\^([^\\^$.*+?{}\[\]()]*)\$")
_STAND_INS = {0xE000 + code: chr(code) for code in range(128)}
"""Characters that stand for those of ASCII where these mean themselves, escaped or in a class."""


def with_plain_names(schema: Schema, root: Mapping[str, object]) -> Schema:
    """Return a schema without `propertyNames`, and without patterns of a few names, where that is exact."""
    if "propertyNames" in schema:
        schema = _without_rule(schema, schema["propertyNames"], root)
    return _with_listed_names(schema) if "patternProperties" in schema else schema


def _without_rule(schema: Schema, rule: object, root: Mapping[str, object]) -> Schema:
    """Express `propertyNames`; return the schema unchanged if that is not possible."""
    free = {key: value for key, value in schema.items() if key != "propertyNames"}
    rule = resolved(rule, root)
    bare = {key: value for key, value in entries(rule).items() if key not in ANNOTATIONS}
    if bare.get("type") == "string" or "string" in items(bare.get("type")):
        del bare["type"]
    if rule is not False and not bare:
        return free
    listed, others = entries(schema.get("properties")), schema.get("additionalProperties", True)
    match sorted(bare):
        case _ if "patternProperties" in schema:
            return schema
        case ["const"] | ["enum"]:
            names = [bare["const"]] if "const" in bare else items(bare["enum"])
            named = {name: listed.get(name, others) for name in names if isinstance(name, str)}
            if len(named) <= NAMES_MAX:
                properties = dict.fromkeys(listed, False) | named
                return free | {"properties": properties, "additionalProperties": False}
        case ["pattern"] | ["minLength"] | ["maxLength"] | ["maxLength", "minLength"] if not listed:
            length = rf"^[\s\S]{{{bare.get('minLength', 0)},{bare.get('maxLength', '')}}}$"
            pattern = bare.get("pattern", length)
            if isinstance(pattern, str) and is_writable(pattern):
                return free | {"patternProperties": {pattern: others}, "additionalProperties": False}
    return schema


def _with_listed_names(schema: Schema) -> Schema:
    """Replace each pattern that matches only a few names, some of them listed, with these names."""
    listed = entries(schema.get("properties"))
    taken = {*listed, *items(schema.get("required"))}
    properties, patterns = dict(listed), dict[str, object]()
    for pattern, value in entries(schema["patternProperties"]).items():
        names = _names(pattern)
        if taken.isdisjoint(names):
            patterns[pattern] = value
        for name in sorted(names) if pattern not in patterns else ():
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value
    if len(patterns) == len(entries(schema["patternProperties"])):
        return schema
    changed = schema | {"properties": properties, "patternProperties": patterns}
    return changed if patterns else {key: changed[key] for key in changed if key != "patternProperties"}


def _names(pattern: str) -> set[str]:
    """Return all names that a pattern matches; none if they are too many, or unknown."""
    if len(pattern) > NAME_PATTERN_MAX or any(ord(character) in _STAND_INS for character in pattern):
        return set()
    text = _ESCAPE.sub(lambda found: _stand_in(found[1]), pattern).replace(r"\d", "[0-9]").replace("(?:", "(")
    todo, found = [_MAYBE.sub(r"(\1|)", _CLASS.sub(_alternatives, text))], list[str]()
    while todo:
        text = todo.pop()
        if group := _GROUP.search(text):
            todo += [text[: group.start()] + way + text[group.end() :] for way in group[1].split("|")]
        else:
            found += text.split("|")
        if len(todo) + len(found) > NAMES_MAX:
            return set()
    names = [_NAME.fullmatch(text) for text in found]
    return {name[1].translate(_STAND_INS) for name in names if name} if all(names) else set()


def _alternatives(members: re.Match[str]) -> str:
    """Return a group for a class of characters."""
    found = list[int]()
    for first, last in _RANGE.findall(members[1]):
        found += range(ord(first), min(ord(last or first), ord(first) + NAMES_MAX) + 1)
    return f"({'|'.join(map(_stand_in, map(chr, found)))})"


def _stand_in(character: str) -> str:
    return chr(0xE000 + ord(character)) if character.isascii() else character
