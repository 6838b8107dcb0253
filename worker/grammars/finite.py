"""Schemas that no finite value satisfies, such as one that requires a member of its own kind. Pure.

The references with a finite value are the least fixed point: a value is finite if what it requires is. All
others allow nothing, so they become `false`, of which llguidance takes account where it is optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.grammars.references import Schema, SchemaError, entries, items, looked_up, nodes

PASSES_MAX = 20
"""Maximum number of passes over the references. After them, those that are left count as finite."""
PARTS_MAX = 16
"""Maximum number of schemas that are regarded together as one by `allOf`."""
_DEPTH_MAX = 300
_CONSTANTS = ("enum", "const", "default", "examples")


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
        target = self._target(schema, True)
        if target is False or (isinstance(target, dict) and id(target) not in self._finite):
            return False
        if not all(map(self.exists, items(schema.get("allOf")))):
            return False
        choices = [items(schema.get(key)) for key in ("anyOf", "oneOf")]
        if not all(any(map(self.exists, options)) for options in choices if options):
            return False
        parts = self._parts(schema)
        kinds = [{*map(str, items(part["type"]) or [part["type"]])} for part in parts if "type" in part]
        kind = set.intersection(*kinds) if kinds else {"null"}
        if not kind or kind - {"array", "object"}:
            return True
        return ("object" in kind and self._object(parts)) or ("array" in kind and self._array(parts))

    def _target(self, schema: Mapping[str, Any], otherwise: object) -> object:
        reference = schema.get("$ref")
        return self._targets.get(reference, otherwise) if isinstance(reference, str) else otherwise

    def _parts(self, schema: Schema) -> list[Mapping[str, Any]]:
        """Return a schema and those that its values must satisfy too."""
        found = [schema, *map(entries, items(schema.get("allOf")))]
        targets = [self._target(part, None) for part in found]
        return [part for part in (*found, *targets)[:PARTS_MAX] if isinstance(part, dict)]

    def _object(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        required = [name for part in parts for name in items(part.get("required")) if isinstance(name, str)]
        if required:
            return all(self.exists(_member(part, name)) for name in required for part in parts)
        return all(any(map(self.exists, _members(part))) for part in parts if part.get("minProperties"))

    def _array(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        counts = [part.get("minItems", 0) for part in parts]
        fewest = max(count for count in counts if isinstance(count, int))
        for part in parts:
            listed = items(part.get("prefixItems")) or items(part.get("items"))
            others = part.get("additionalItems" if isinstance(part.get("items"), list) else "items", True)
            needed = listed[:fewest] + ([others] if fewest > len(listed) else [])
            if not all(map(self.exists, needed)):
                return False
        return True


def _member(part: Mapping[str, Any], name: str) -> object:
    """Return the schema of a member; an empty one where a pattern may match its name."""
    listed = entries(part.get("properties"))
    return listed.get(name, True if "patternProperties" in part else part.get("additionalProperties", True))


def _members(part: Mapping[str, Any]) -> list[object]:
    named = [*entries(part.get("properties")).values(), *entries(part.get("patternProperties")).values()]
    return [*named, part.get("additionalProperties", True)]


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
