"""References within a JSON schema, and schemas that no finite value satisfies. Pure.

The references with a finite value are the least fixed point: a value is finite if what it requires is. All
others, such as an object that requires a member of its own kind, allow nothing, so they become `false`, of
which llguidance takes account where it is optional.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

REFERENCES_MAX = 100
"""Maximum number of references that are followed to find a schema."""
INDEX_DIGITS_MAX = 10
"""Maximum digits of a place in a list."""
PASSES_MAX = 20
"""Maximum number of passes over the references. After them, those that are left count as finite."""
_DEPTH_MAX = 300
_CONSTANTS = ("enum", "const", "default", "examples")


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
        if isinstance(place, list):
            is_index = name.isdecimal() and len(name) < INDEX_DIGITS_MAX and int(name) < len(place)
            place = place[int(name)] if is_index else {}
        else:
            place = entries(place).get(name.replace("~1", "/").replace("~0", "~"), {})
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


def without_endless_values(root: Schema) -> Schema:
    """Return a schema that allows finite values only. Raises `SchemaError` if there is none."""
    values = _FiniteValues(root)
    endless = values.endless()
    if not endless:
        return root
    if not values.exists(root):
        message = f"has no valid value that ends: '{min(endless)}' requires a value of its own kind"
        raise SchemaError(message)
    pruned: Schema = _pruned(root, endless, 0)
    return pruned


class _FiniteValues:
    def __init__(self, root: Schema) -> None:
        names = dict.fromkeys(node["$ref"] for node in nodes(root) if isinstance(node.get("$ref"), str))
        self._targets = {name: looked_up(name, root) for name in names}
        self._finite = {id(target) for target in self._targets.values() if target == {}}
        """Ids of the schemas with a finite value, as far as known. References to elsewhere count as such."""

    def endless(self) -> frozenset[str]:
        """Return the references to schemas that no finite value satisfies."""
        left = [*{id(target): target for target in self._targets.values()}.values()]
        for _ in range(PASSES_MAX):
            before = len(left)
            left = [target for target in reversed(left) if not self.exists(target)]
            if len(left) == before:
                endless = {*map(id, left)}
                return frozenset(name for name, target in self._targets.items() if id(target) in endless)
        return frozenset()

    def exists(self, schema: object) -> bool:
        """Whether a finite value satisfies a schema, as far as its references are known."""
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) not in self._finite and self._exists(schema):
            self._finite.add(id(schema))
        return id(schema) in self._finite

    def _exists(self, schema: Schema) -> bool:
        if not schema.keys().isdisjoint(("const", "enum")):
            return True
        reference = schema.get("$ref")
        target = self._targets.get(reference, True) if isinstance(reference, str) else True
        if target is False or (isinstance(target, dict) and id(target) not in self._finite):
            return False
        if not all(map(self.exists, items(schema.get("allOf")))):
            return False
        choices = [items(schema.get(key)) for key in ("anyOf", "oneOf")]
        if not all(any(map(self.exists, options)) for options in choices if options):
            return False
        kinds = {*map(str, items(schema.get("type")) or [schema.get("type")])}
        if kinds - {"array", "object"}:
            return True
        return ("object" in kinds and self._object(schema)) or ("array" in kinds and self._array(schema))

    def _object(self, schema: Schema) -> bool:
        listed, others = entries(schema.get("properties")), schema.get("additionalProperties", True)
        matched = entries(schema.get("patternProperties"))
        if required := items(schema.get("required")):
            free = True if matched else others  # a pattern may match the name
            return all(self.exists(listed.get(str(name), free)) for name in required)
        members = [*listed.values(), *matched.values(), others]
        return not schema.get("minProperties") or any(map(self.exists, members))

    def _array(self, schema: Schema) -> bool:
        fewest = schema.get("minItems", 0)
        listed = items(schema.get("prefixItems")) or items(schema.get("items"))
        others = schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items", True)
        return all(map(self.exists, listed[:fewest] + ([others] if fewest > len(listed) else [])))


def _pruned(node: Any, endless: frozenset[str], depth: int) -> Any:
    """Return a copy in which endless references are `false`."""
    if isinstance(node, list):
        return [_pruned(value, endless, depth + 1) for value in node]
    if not isinstance(node, dict) or depth > _DEPTH_MAX:
        return node
    if isinstance(node.get("$ref"), str) and node["$ref"] in endless:
        return False
    return {
        key: value if key in _CONSTANTS else _pruned(value, endless, depth + 1) for key, value in node.items()
    }
