"""Sample messages of every type: with every field set, and with only the required ones.

Their values follow from the fields. `golden.json` has their encoded form and the defaults of all fields. A
new field or message may add to it, but nothing in it may change or go, as peers of earlier versions send it.
`python -m tests.protocol.samples` prints the new file for comparison.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from protocol import wire
from protocol.conversation import pack
from protocol.messages import PROTOCOL_VERSION, Generate, Message, ToGateway, ToWorker

GOLDEN = Path(__file__).with_name("golden.json")
UNIONS = {"to_worker": ToWorker, "to_gateway": ToGateway}
Decoder = Callable[[Sequence[bytes]], tuple[Message, Sequence[bytes]]]
DECODERS: dict[str, Decoder] = {"to_worker": wire.decode_to_worker, "to_gateway": wire.decode_to_gateway}

GATEWAY, WORKER = "6761746577617931", "776f726b65723031"
IMAGE = b"\x89PNG\r\n\x1a\n and the rest"

_CONVERSATION = [
    {"role": "system", "content": "Du bist der Fahrdienstleiter."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "駅はどこ? 🚂"}]},
]
_PACKED: dict[str, object] = {
    "messages": _CONVERSATION,
    "tools": [{"type": "function", "function": {"name": "switch", "parameters": {"type": "object"}}}],
    "late_tools": [{"type": "function", "function": {"name": "signal"}}],
    "template_kwargs": {"enable_thinking": False, "budget": 1.5, "nothing": None},
    "texts": ["駅はどこ?", [1, 151643]],
}
_SPECIAL: dict[str, object] = {
    # Of fields whose type does not say what a valid value is.
    "version": PROTOCOL_VERSION, "count": 2, "vectors": bytes.fromhex("0000803f000080bf"), "frame": 0,
    "frames": 2, "sequence": 0, "max_tokens": 64, "code": "context_length_exceeded", "reason": "length",
    "phase": "decode",
}  # fmt: skip
_VALUES: dict[type, object] = {
    inspect.IntType: 70000, inspect.FloatType: 0.375, inspect.BytesType: b"\xe9\xa7",
}  # fmt: skip


def _value(kind: inspect.Type, name: str, default: object, *, full: bool) -> Any:
    """Return a value of the type, other than `default`, for the field `name`."""
    match kind:
        case inspect.UnionType(types=types):
            return _value(types[0], name, default, full=full)
        case inspect.StructType():
            return _struct(kind, full=full)
        case inspect.ListType(item_type=item):
            return [_value(item, name, None, full=full)]
        case inspect.TupleType(item_types=items):
            return tuple(_value(item, name, None, full=full) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {_value(key, name, None, full=full): _value(value, name, None, full=full)}
        case inspect.BoolType():
            return not default
        case inspect.LiteralType(values=values):
            return values[-1]
        case inspect.StrType():
            return f"{name} 駅"
    return _VALUES[type(kind)]


def _field(field: inspect.Field, *, full: bool) -> Any:
    if isinstance(field.type, inspect.RawType):
        return pack(_PACKED[field.name])
    if field.name in _SPECIAL:
        return _SPECIAL[field.name]
    return _value(field.type, field.name, field.default, full=full)


def _struct(kind: inspect.StructType, *, full: bool, **given: object) -> Any:
    values = {field.name: _field(field, full=full) for field in kind.fields if full or field.required}
    return kind.cls(**values | given)


def _members(direction: str) -> Iterator[inspect.StructType]:
    for member in get_args(UNIONS[direction]):
        kind = inspect.type_info(member)
        assert isinstance(kind, inspect.StructType)
        yield kind


def _samples(*, full: bool) -> list[Message]:
    senders = {"to_worker": GATEWAY, "to_gateway": WORKER}
    return [
        _struct(kind, full=full, incarnation=sender)
        for direction, sender in senders.items()
        for kind in _members(direction)
    ]


FULL, LEAST = _samples(full=True), _samples(full=False)
KINDS = {"full": FULL, "least": LEAST}


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def defaults() -> dict[str, str]:
    """Return the defaults of each struct on the wire, by its name."""
    found: dict[str, str] = {}

    def visit(value: object) -> None:
        if isinstance(value, list | dict):
            for inner in value.values() if isinstance(value, dict) else value:
                visit(inner)
        if isinstance(value, msgspec.Struct):
            fields = msgspec.structs.fields(value)
            optional = [f"{field.name}={default_of(field)!r}" for field in fields if not field.required]
            found[type(value).__name__] = ", ".join(optional)
            for name in value.__struct_fields__:
                visit(getattr(value, name))

    visit(FULL)
    return found


def media_of(message: Message) -> list[bytes]:
    """Return the media frames that follow a sample."""
    return [IMAGE] * sum(media.frames for media in message.media) if isinstance(message, Generate) else []


def direction_of(message: Message) -> str:
    return next(name for name, union in UNIONS.items() if isinstance(message, get_args(union)))


def golden() -> dict[str, dict[str, str]]:
    """Return what is pinned: "full" and "least" frames in hexadecimal, and "defaults", by type name."""
    read: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return read


def golden_frames() -> list[list[bytes]]:
    """Return every golden message as frames on the wire."""
    return [
        [bytes.fromhex(golden()[kind][type(message).__name__]), *media_of(message)]
        for kind, samples in KINDS.items()
        for message in samples
    ]


def encoded() -> dict[str, dict[str, str]]:
    """Return what `golden.json` should have."""
    frames = {
        kind: {type(each).__name__: wire.encode(each, media_of(each))[0].hex() for each in samples}
        for kind, samples in KINDS.items()
    }
    return {**frames, "defaults": defaults()}


if __name__ == "__main__":
    print(json.dumps(encoded(), indent=1))
