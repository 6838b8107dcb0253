"""Names of properties: keywords that llguidance lacks for them, written as those that it has. Pure.

A pattern that matches only a few names is written as these names in `properties`. llguidance would leave no
name to choose where all of them are listed already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker.grammars.patterns import is_writable
from worker.grammars.references import Schema, entries, items, looked_up, resolved

NAMES_MAX = 32
"""Maximum number of names that a pattern is replaced with, and of repetitions within it."""
NAME_PATTERN_MAX = 200
"""Maximum characters of such a pattern."""
DEPTH_MAX = 20
"""Maximum nesting of a rule for names."""
ANNOTATIONS = frozenset(
    ("title", "description", "$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "examples")
) | {"default", "format", "deprecated"}
"""Keywords without effect on the validity of names."""

_UNIVERSAL = frozenset(("", "^", "$", ".*", "^.*", ".*$", r"^[\s\S]*$", r"[\s\S]*"))
_ATOM = re.compile(r"\\([^\w\s]|d)|([^\\^$.|?*+()\[\]{}])|\[([^\\^\[\]][^\\\[\]]*)\]")
_COUNT = re.compile(r"\?|\{(\d{1,3})(?:,(\d{1,3}))?\}")


class _TooManyError(Exception):
    """A pattern matches more names than are listed, or has parts that are not read here."""


def with_plain_names(schema: Schema, root: Mapping[str, object]) -> Schema:
    """Return a schema without `propertyNames`, and without patterns of a few names, where that is exact."""
    if "propertyNames" in schema:
        schema = _without_rule(schema, schema["propertyNames"], root)
    return _with_listed_names(schema) if "patternProperties" in schema else schema


def _without_rule(schema: Schema, rule: object, root: Mapping[str, object]) -> Schema:
    """Express `propertyNames`; return the schema unchanged if that is not possible."""
    free = {key: value for key, value in schema.items() if key != "propertyNames"}
    if _is_true_of_all(rule, root, 0):
        return free
    bare = _bare(rule, root)
    if "$ref" in bare and len(bare) == 1:
        bare = _bare(resolved(bare, root), root)
    if "patternProperties" in schema:
        return schema
    listed, others = entries(schema.get("properties")), schema.get("additionalProperties", True)
    match sorted(bare):
        case ["const"] | ["enum"]:
            names = [bare["const"]] if "const" in bare else items(bare["enum"])
            named = {name: listed.get(name, others) for name in names if isinstance(name, str)}
            if len(named) <= NAMES_MAX:
                properties = dict.fromkeys(listed, False) | named
                return free | {"properties": properties, "additionalProperties": False}
        case ["pattern"] | ["minLength"] | ["maxLength"] | ["maxLength", "minLength"] if not listed:
            pattern = bare.get("pattern", _of_length(bare.get("minLength", 0), bare.get("maxLength", "")))
            if isinstance(pattern, str) and is_writable(pattern):
                return free | {"patternProperties": {pattern: others}, "additionalProperties": False}
    return schema


def _bare(rule: object, root: Mapping[str, object]) -> Schema:
    """Return the keywords of a rule that some name violates."""
    return {key: value for key, value in entries(rule).items() if not _is_true(key, value, root, 0)}


def _of_length(fewest: object, most: object) -> str:
    return rf"^[\s\S]{{{fewest},{most}}}$"


def _is_true_of_all(rule: object, root: Mapping[str, object], depth: int) -> bool:
    """Whether every name satisfies a rule."""
    if not isinstance(rule, dict) or depth > DEPTH_MAX:
        return rule is True
    return all(_is_true(key, value, root, depth + 1) for key, value in rule.items())


def _is_true(key: str, value: object, root: Mapping[str, object], depth: int) -> bool:
    match key:
        case "type":
            return value == "string" or "string" in items(value)
        case "minLength":
            return value == 0
        case "pattern":
            return value in _UNIVERSAL
        case "allOf":
            return all(_is_true_of_all(rule, root, depth) for rule in items(value))
        case "anyOf":
            return any(_is_true_of_all(rule, root, depth) for rule in items(value))
        case "$ref":
            return _is_true_of_all(looked_up(str(value), root), root, depth)
    return key in ANNOTATIONS or (key == "not" and value is False)


def _with_listed_names(schema: Schema) -> Schema:
    """Replace each pattern that matches only a few names with these names.

    Not where names are counted, unless it must be: llguidance counts those of `patternProperties` only.
    """
    listed = entries(schema.get("properties"))
    taken = {*listed, *map(str, items(schema.get("required")))}
    is_counted = not schema.keys().isdisjoint(("minProperties", "maxProperties"))
    properties, patterns = dict(listed), dict[str, object]()
    for pattern, value in entries(schema["patternProperties"]).items():
        names = _names(pattern)
        if names is None or (is_counted and taken.isdisjoint(names)):
            patterns[pattern] = value
            continue
        for name in sorted(names):
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value
    if len(patterns) == len(entries(schema["patternProperties"])):
        return schema
    changed = schema | {"properties": properties, "patternProperties": patterns}
    return changed if patterns else {key: changed[key] for key in changed if key != "patternProperties"}


def _names(pattern: str) -> set[str] | None:
    """Return all names that a pattern matches; None: they are too many, or unknown."""
    if len(pattern) > NAME_PATTERN_MAX:
        return None
    found, at = set[str](), -1
    try:
        while at < len(pattern):
            if pattern[at + 1 : at + 2] != "^":
                return None
            names, at = _sequence(pattern, at + 2)
            if pattern[at : at + 1] != "$" or pattern[at + 1 : at + 2] not in ("", "|"):
                return None
            found, at = found | names, at + 1
    except _TooManyError:
        return None
    return found if len(found) <= NAMES_MAX else None


def _sequence(pattern: str, at: int) -> tuple[set[str], int]:
    """Return the texts of a sequence, and the place of the `|`, `)` or `$` that ends it."""
    found = {""}
    while at < len(pattern) and pattern[at] not in "|)$":
        if pattern[at] == "(":
            options, at = _group(pattern, at + 1)
        elif atom := _ATOM.match(pattern, at):
            options, at = _characters(atom), atom.end()
        else:
            raise _TooManyError
        fewest = most = 1
        if count := _COUNT.match(pattern, at):
            fewest = int(count[1] or 0)
            most = int(count[2] or count[1] or 1)
            at = count.end()
        found = {before + text for before in found for text in _repeated(options, fewest, most)}
        if len(found) > NAMES_MAX:
            raise _TooManyError
    return found, at


def _group(pattern: str, at: int) -> tuple[set[str], int]:
    at += 2 * pattern.startswith("?:", at)
    found = set[str]()
    while True:
        options, at = _sequence(pattern, at)
        found |= options
        if pattern[at : at + 1] != "|":
            break
        at += 1
    if pattern[at : at + 1] != ")":
        raise _TooManyError
    return found, at + 1


def _characters(atom: re.Match[str]) -> set[str]:
    escape, plain, members = atom.groups()
    if members is None:
        return {*"0123456789"} if escape == "d" else {escape or plain}
    found = set[str]()
    for first, last in re.findall(r"(.)(?:-(.))?", members, re.DOTALL):
        found |= {
            chr(code) for code in range(ord(first), min(ord(last or first), ord(first) + NAMES_MAX) + 1)
        }
    return found


def _repeated(options: set[str], fewest: int, most: int) -> set[str]:
    if most > NAMES_MAX or fewest > most:
        raise _TooManyError
    found, last = set[str](), {""}
    for count in range(most + 1):
        if count >= fewest:
            found |= last
        last = {before + text for before in last for text in options}
        if len(found) > NAMES_MAX or len(last) > NAMES_MAX**2:
            raise _TooManyError
    return found
