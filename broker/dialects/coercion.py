"""Coercion of a decoded JSON body to its type: null means absent, and an integer may be written `426.0`.

msgspec takes null only where a type names it, and floats never as integers; its lax mode would accept strings
as numbers too. So a body that it refuses for either is walked along its type, and decoded again. Values whose
type is open are data, and stay as they are: arguments of a tool call, JSON Schemas, options of a template.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.inspect import DictType, FloatType, IntType, ListType, Metadata, StructType, Type, UnionType

EXACT_MAX = 2**53
"""Beyond this, a float may differ from the number in the body."""

_CAUSES = ("got `null`", "got `float`", "Expected `str` - at")
"""The last one is what msgspec says of a null in place of an object's tag."""
_type_of = cache(inspect.type_info)


def is_curable(error: msgspec.ValidationError) -> bool:
    """Return whether msgspec refused a value that `coerce` may change."""
    return any(cause in str(error) for cause in _CAUSES)


def coerce(value: Any, kind: Any) -> Any:
    """Return the value for the Python type `kind`, without nulls for absent fields and entries, and with
    integers for integral floats.

    Elements of an array have no name that could be absent, so their nulls stay, to be refused.
    """
    return _coerced(value, _type_of(kind))


def _coerced(value: Any, kind: Type) -> Any:
    match kind:
        case Metadata():
            return _coerced(value, kind.type)
        case StructType() if isinstance(value, dict):
            return _coerced_struct(value, kind)
        case ListType() if isinstance(value, list):
            return [_coerced(item, kind.item_type) for item in value]
        case DictType() if isinstance(value, dict):
            return _coerced_entries(value, dict.fromkeys(value, kind.value_type))
        case UnionType():
            return _coerced(value, _member(value, kind)) if value is not None else None
        case IntType() if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
            return int(value)
    return value


def _coerced_struct(value: dict[str, Any], kind: StructType) -> dict[str, Any]:
    entries = {field.encode_name: field.type for field in kind.fields}
    if kind.tag_field is not None:
        entries[kind.tag_field] = inspect.StrType()
    return _coerced_entries(value, entries)


def _coerced_entries(value: dict[str, Any], kinds: dict[str, Type]) -> dict[str, Any]:
    changed = dict(value)
    for name, kind in kinds.items():
        if name not in changed:
            continue
        if changed[name] is None and not _takes_null(kind):
            del changed[name]
        else:
            changed[name] = _coerced(changed[name], kind)
    return changed


def _takes_null(kind: Type) -> bool:
    match kind:
        case Metadata():
            return _takes_null(kind.type)
        case UnionType():
            return any(map(_takes_null, kind.types))
        case inspect.LiteralType():
            return None in kind.values
        case _:
            return isinstance(kind, inspect.AnyType | inspect.RawType | inspect.NoneType)


def _member(value: Any, union: UnionType) -> Type:
    """Return the member of a union that a value belongs to: of tagged objects, the one with its tag."""
    kinds = [kind.type if isinstance(kind, Metadata) else kind for kind in union.types]
    match value:
        case dict():
            objects = [kind for kind in kinds if isinstance(kind, StructType | DictType)]
            tagged = [kind for kind in objects if isinstance(kind, StructType) and kind.tag_field]
            of_tag = [kind for kind in tagged if value.get(kind.tag_field) in (kind.tag, None)]
            return next(iter(of_tag if tagged else objects), inspect.AnyType())
        case list():
            return next((kind for kind in kinds if isinstance(kind, ListType)), inspect.AnyType())
        case float() if not any(isinstance(kind, FloatType) for kind in kinds):
            return next((kind for kind in kinds if isinstance(kind, IntType)), inspect.AnyType())
        case _:
            return inspect.AnyType()
