"""Patterns of a JSON schema, and the names of properties. Pure.

Patterns that a grammar cannot express are refused. `propertyNames`, which llguidance lacks, is written with
keywords that it has. A pattern that matches only a few names is written as these names in `properties` where
some of them are listed already: llguidance would leave no name to choose where all of them are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from llguidance import regex_to_lark

from worker.grammars.references import Schema, SchemaError, entries, items, looked_up, resolved

PATTERNS_MAX = 4
"""Maximum of `pattern`s that one string must match: their automata are multiplied, at any cost in memory."""

UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can write only as \\uXXXX. llguidance would drop them from constants."""
_HEX = "0[0-7be-f]|1[0-9a-f]|7f"
_UNWRITTEN_HERE = rf"{UNWRITTEN.pattern}|\\[avc0]|\\(?:x|u00)(?:{_HEX})|\\[xu]{{0*(?:[0-7be-f]|{_HEX})}}"
_UNWRITTEN_IN_PATTERN = re.compile(_UNWRITTEN_HERE, re.IGNORECASE)
_UNWRITTEN_CLASS = re.compile(rf"\[(?:{_UNWRITTEN_HERE}|-)+\]", re.IGNORECASE)
_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]")
_ESCAPE_OR_CLASS = re.compile(rf"\\[^1-9]|{_CLASS.pattern}")
_UNSUPPORTED = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Look-arounds and back-references, apart from classes and escapes."""

NAMES_MAX = 32
"""Maximum number of names that a pattern is replaced with."""
NAME_PATTERN_MAX = 200
"""Maximum characters of such a pattern."""
ANNOTATIONS = frozenset(
    ("title", "description", "$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "examples")
) | {"default", "format", "deprecated"}
"""Keywords without effect on the validity of names."""

_ESCAPE = re.compile(r"\\([^\w\s])")
_LISTED_CLASS = re.compile(r"\[([^\\^\[\]]+)\]")
_RANGE = re.compile(r"(.)(?:-(.))?", re.DOTALL)
_MAYBE = re.compile(r"([^()|?]|\([^()]*\))\?")
_GROUP = re.compile(r"\(([^()]*)\)")
_NAME = re.compile(r"\^([^\\^$.*+?{}\[\]()]*)\$")
_STAND_INS = {0xE000 + code: chr(code) for code in range(128)}
"""Characters that stand for those of ASCII where these mean themselves, escaped or in a class."""


def check_pattern(pattern: str, keyword: str) -> None:
    """Refuse what llguidance would enforce only loosely, or allow no text for. Raises `SchemaError`."""
    found = _UNWRITTEN_CLASS.search(pattern)
    if found is None or _has_written(found[0]):
        found = _UNWRITTEN_IN_PATTERN.search(_CLASS.sub("", pattern))
    if found:
        raise SchemaError(f"contains the control character {found[0]!r} in a '{keyword}'", keyword)
    if found := _UNSUPPORTED.search(_ESCAPE_OR_CLASS.sub("", pattern)):
        what = "look-around" if found[0].startswith("(") else "back-reference"
        raise SchemaError(f"has a '{keyword}' with the {what} '{found[0]}'", keyword)


def _has_written(characters: str) -> bool:
    """Whether a class has a control character that JSON writes with a short escape."""
    try:
        return re.search(characters, "\b\t\n\f\r") is not None
    except re.error:  # Python has not all escapes
        return False


def is_writable(pattern: str) -> bool:
    """Whether `check_pattern` accepts a pattern."""
    try:
        check_pattern(pattern, "pattern")
    except SchemaError:
        return False
    return True


def check_combined(root: Schema) -> None:
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
    return [*items(node.get("allOf")), *([looked_up(reference, root)] if isinstance(reference, str) else [])]


def searched(pattern: str) -> str | None:
    """Convert a JSON Schema pattern, which may match anywhere, to one that matches a whole string; None: it
    has anchors elsewhere than at its ends."""
    body = pattern.removeprefix("^")
    is_first = body != pattern
    is_last = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if is_last else body
    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", body)
    if re.search(r"[\^$]", plain) or ((is_first or is_last) and _has_alternatives(plain)):
        return None
    anything = "(?s:.)*"
    body = regex_to_lark(f"(?:{body})", "dw")
    return f"{'' if is_first else anything}{body}{'' if is_last else anything}"


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern has alternatives outside of groups."""
    depth = 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            return True
    return False


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
    todo, found = [_MAYBE.sub(r"(\1|)", _LISTED_CLASS.sub(_alternatives, text))], list[str]()
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
