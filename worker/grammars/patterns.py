"""Regular expressions of a JSON schema: those that a grammar cannot express are refused. Pure."""

from __future__ import annotations

import re

from worker.grammars.references import Schema, SchemaError, items, looked_up

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
