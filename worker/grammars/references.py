"""References within a JSON schema, and the error of one that is not supported. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

REFERENCES_MAX = 100
"""Maximum number of references that are followed to find a schema."""


class SchemaError(Exception):
    """A schema is not supported. The message is a sentence without its subject, the schema.

    `keyword`: the one that cannot be enforced; empty if the schema is malformed or too large.
    """

    def __init__(self, message: str, keyword: str = "") -> None:
        super().__init__(message)
        self.keyword = keyword


def looked_up(reference: str, root: Mapping[str, Any]) -> object:
    """Return what a reference points to; an empty schema if that is not in the same one."""
    place: Any = root if reference.startswith("#") else {}
    for name in filter(None, unquote(reference).removeprefix("#").split("/")):
        place = place.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(place, dict) else {}
    return place


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Resolve a reference within the same schema; return anything else unchanged."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
            return schema
        schema = looked_up(str(schema["$ref"]), root)
    return {}


def within(schema: Mapping[str, Any], part: object) -> object:
    """Return a part of a schema, with the definitions it may refer to."""
    if not isinstance(part, dict):
        return part
    return {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema} | part


def items(values: object) -> list[object]:
    """Return the values of a list; nothing for anything else, as in a malformed schema."""
    return values if isinstance(values, list) else []


def entries(values: object) -> Mapping[str, Any]:
    """Return an object's members; nothing for anything else, as in a malformed schema."""
    return values if isinstance(values, dict) else {}


def nodes(root: object) -> Iterator[dict[str, Any]]:
    """Yield all objects in a value, its schemas among them. Not recursive: it may be nested deeply."""
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
        stack += node.values() if isinstance(node, dict) else items(node)
