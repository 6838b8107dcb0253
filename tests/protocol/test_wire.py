"""Wire format: compatible with earlier versions, and one error for malformed frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import msgspec
import pytest

from protocol import wire
from protocol.messages import Accepted, Cancel, Generate, Heartbeat, Hello, Message, StepOutputs
from protocol.types import Media, RequestStatus, Sampling
from tests.factories import request
from tests.protocol.samples import (
    DECODERS,
    FULL,
    GATEWAY,
    IMAGE,
    KINDS,
    LEAST,
    UNIONS,
    WORKER,
    default_of,
    defaults,
    direction_of,
    golden,
    media_of,
)

Decode = Callable[[Sequence[bytes]], tuple[Message, list[bytes]]]

SAMPLES = [(kind, message) for kind, messages in KINDS.items() for message in messages]
NAMED = pytest.mark.parametrize(
    ("kind", "sample"), SAMPLES, ids=[f"{type(m).__name__}-{kind}" for kind, m in SAMPLES]
)


def decoder(message: Message) -> Decode:
    return DECODERS[direction_of(message)]


def pack(document: object) -> bytes:
    return msgspec.msgpack.encode(document)


def unpack(body: bytes) -> Any:
    return msgspec.msgpack.decode(body)


# --- golden frames -----------------------------------------------------------------------------------


def test_all_message_types_and_defaults_are_pinned() -> None:
    members = {member.__name__ for union in UNIONS.values() for member in get_args(union)}
    assert golden().keys() == {*KINDS, "defaults"}
    assert golden()["full"].keys() == golden()["least"].keys() == members
    # Peers of earlier versions leave out fields at these values.
    assert defaults() == golden()["defaults"]


@NAMED
def test_a_message_is_encoded_to_its_golden_frame_and_decoded_from_it(kind: str, sample: Message) -> None:
    body, *media = wire.encode(sample, media_of(sample))
    pinned = bytes.fromhex(golden()[kind][type(sample).__name__])
    # Not byte for byte: the header of a map is wider once its struct has sixteen fields.
    assert repr(unpack(body)) == repr(unpack(pinned))
    assert media == media_of(sample)
    message, decoded_media = decoder(sample)([pinned, *media])
    assert (message, type(message)) == (sample, type(sample))
    assert decoded_media == media


def test_a_full_sample_sets_every_field_to_something_else_than_its_default() -> None:
    # Otherwise `omit_defaults` omits the field, and no golden frame pins its name on the wire.
    for sample in FULL:
        left_out = _fields_at_default(sample)
        assert left_out == [], f"{type(sample).__name__}: {left_out}"


def _fields_at_default(value: object) -> list[str]:
    if isinstance(value, list):
        # The first element of a list has every field set.
        return _fields_at_default(value[0]) if value and isinstance(value[0], msgspec.Struct) else []
    if not isinstance(value, msgspec.Struct):
        return []
    found = []
    for field in msgspec.structs.fields(type(value)):
        inner = getattr(value, field.name)
        if not field.required and inner == default_of(field):
            found.append(field.name)
        found += [f"{field.name}.{name}" for name in _fields_at_default(inner)]
    return found


# --- neighbouring versions ---------------------------------------------------------------------------


@NAMED
def test_a_newer_peer_may_send_fields_that_are_unknown_here(kind: str, sample: Message) -> None:
    body = wire.encode(sample, media_of(sample))[0]
    frames = [pack(_with_later_fields(sample, unpack(body))), *media_of(sample)]
    message, _ = decoder(sample)(frames)
    assert message == sample


def _with_later_fields(value: object, encoded: Any) -> Any:
    """Return `encoded` with unknown fields added to every struct in it."""
    if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return [_with_later_fields(v, e) for v, e in zip(value, encoded, strict=True)]
    if not isinstance(value, msgspec.Struct):
        return encoded
    known = {
        name: _with_later_fields(getattr(value, name), inner) if name != "type" else inner
        for name, inner in encoded.items()
    }
    later = {"later_text": "x", "later_list": [1, {"deep": None}], "later_bytes": b"\xff\xfe"}
    return later | known


@pytest.mark.parametrize("sample", FULL, ids=lambda m: type(m).__name__)
def test_an_older_peer_may_leave_out_each_field_that_has_a_default(sample: Message) -> None:
    whole = len(wire.encode(sample, media_of(sample))[0])
    for earlier in _without_each_field(sample):
        frames = wire.encode(earlier, media_of(earlier))
        assert len(frames[0]) < whole
        assert decoder(sample)(frames)[0] == earlier


def _without_each_field(value: Any) -> Iterator[Any]:
    """Yield the value with each field, at any depth, at its default."""
    if isinstance(value, list) and value:
        yield from ([first, *value[1:]] for first in _without_each_field(value[0]))
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            if not field.required:
                yield msgspec.structs.replace(value, **{field.name: default_of(field)})
            for inner in _without_each_field(getattr(value, field.name)):
                yield msgspec.structs.replace(value, **{field.name: inner})


@pytest.mark.parametrize("sample", LEAST, ids=lambda m: type(m).__name__)
def test_a_message_without_one_of_its_first_fields_is_refused(sample: Message) -> None:
    document = unpack(wire.encode(sample)[0])
    assert document.keys() == {f.name for f in msgspec.structs.fields(sample) if f.required} | {"type"}
    for name in document:
        with pytest.raises(wire.WireError):
            decoder(sample)([pack({k: v for k, v in document.items() if k != name})])


# --- malformed frames --------------------------------------------------------------------------------

START = {"type": "Generate", "incarnation": GATEWAY, "id": "a", "sampling": {"seed": 1}}

GARBAGE = {
    "nothing": b"",
    "an unknown tag": pack({"type": "Later", "incarnation": GATEWAY}),
    "an array": pack([1, 2]),
    "a reserved byte": b"\xc1",
    "a truncated message": pack(START)[:-1],
    "bytes behind the message": pack(START) + b"\x00",
    "text that is not UTF-8": pack(START).replace(b"\xa1a", b"\xa1\xff"),
    "a string where a number belongs": pack(START | {"max_tokens": "64"}),
    "a negative count": pack(START | {"max_tokens": -1}),
    "a seed of 64 bits": pack(START | {"sampling": {"seed": 2**63}}),
    "a list longer than the frame": b"\x81\xa4type" + b"\xdd\xff\xff\xff\xff",
    "a string longer than the frame": b"\x81\xa4type\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("decode", [wire.decode_to_worker, wire.decode_to_gateway])
@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_a_wire_error(body: bytes, decode: Decode) -> None:
    with pytest.raises(wire.WireError):
        decode([body])


@pytest.mark.parametrize(("opening", "field"), [(b"\x91", "template_kwargs"), (b"\x81\xa1a", "later")])
def test_nesting_deeper_than_the_stack_is_a_wire_error(opening: bytes, field: str) -> None:
    body = pack(START | {field: {"k": 0}})
    assert body.endswith(b"\x00")
    with pytest.raises(wire.WireError):
        wire.decode_to_worker([body[:-1] + opening * 1_000_000 + b"\x00"])


def test_what_cannot_be_encoded_or_is_for_the_other_side_is_a_wire_error() -> None:
    for broken in (request(prompt="\ud800"), request(sampling=Sampling(seed=2**64))):
        with pytest.raises(wire.WireError):
            wire.encode(broken)
    for sample in LEAST:
        other = "to_gateway" if direction_of(sample) == "to_worker" else "to_worker"
        with pytest.raises(wire.WireError):
            DECODERS[other](wire.encode(sample))
    with pytest.raises(wire.WireError, match="no frames"):
        wire.decode_to_gateway([])
    with pytest.raises(wire.WireError, match="media frames"):
        wire.decode_to_gateway([*wire.encode(StepOutputs(incarnation=WORKER, deltas=[])), IMAGE])


# --- sizes -------------------------------------------------------------------------------------------


def test_a_message_or_a_media_frame_over_the_limit_is_refused_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message, media = with_images(1), [IMAGE]
    frames = wire.encode(message, media)
    for limit, size, said in (
        ("MESSAGE_BYTES_MAX", len(frames[0]), "bytes"),
        ("MEDIA_BYTES_MAX", len(IMAGE), "media frame"),
    ):
        monkeypatch.setattr(wire, limit, size)
        assert wire.decode_to_worker(wire.encode(message, media)) == (message, media)
        monkeypatch.setattr(wire, limit, size - 1)
        with pytest.raises(wire.WireError, match=said):
            wire.encode(message, media)
        with pytest.raises(wire.WireError, match=said):
            wire.decode_to_worker(frames)
        monkeypatch.undo()


def test_more_media_frames_than_allowed_are_refused_at_both_ends() -> None:
    most = wire.MEDIA_FRAMES_MAX
    message, media = wire.decode_to_worker(wire.encode(with_images(most), [IMAGE] * most))
    assert message == with_images(most)
    assert media == [IMAGE] * most
    with pytest.raises(wire.WireError, match="media frames"):
        wire.encode(with_images(most + 1), [IMAGE] * (most + 1))
    body = pack(msgspec.to_builtins(with_images(most + 1)))
    with pytest.raises(wire.WireError, match="media frames"):
        wire.decode_to_worker([body] + [IMAGE] * (most + 1))


@pytest.mark.parametrize(
    "said",
    [
        Hello(incarnation=WORKER, version=1, model="m", pid=2**40),
        Hello(incarnation=WORKER, version=1, model="m" * 2000, pid=1),
        Accepted(incarnation=WORKER, id="a" * 300, prompt_tokens=1),
        RequestStatus(id="a", phase="decode", prompt_tokens=1, first_token_s=float("inf")),
    ],
    ids=repr,
)
def test_numbers_and_names_that_nothing_could_be_done_with_are_refused(said: Message | RequestStatus) -> None:
    if isinstance(said, RequestStatus):
        said = Heartbeat(incarnation=WORKER, running=1, waiting=0, steps=1, rows=[said])
    with pytest.raises(wire.WireError):
        wire.decode_to_gateway(wire.encode(said))


# --- media -------------------------------------------------------------------------------------------


def with_images(count: int, frames: Sequence[int] | None = None) -> Generate:
    media = [Media(frame=f, mime="image/png", sha256="") for f in frames or range(count)]
    return request(media=media)


@pytest.mark.parametrize(
    ("message", "count"),
    [
        (with_images(1), 0),
        (with_images(1), 2),
        (with_images(2, [1, 0]), 2),
        (with_images(2, [0, 2]), 3),
        (Cancel(incarnation=GATEWAY, id="a"), 1),
    ],
    ids=["missing", "surplus", "out of order", "a gap", "behind another type"],
)
def test_media_frames_must_be_those_the_message_refers_to(message: Message, count: int) -> None:
    media = [IMAGE] * count
    with pytest.raises(wire.WireError, match="media frames"):
        wire.decode_to_worker([pack(msgspec.to_builtins(message)), *media])
    with pytest.raises(wire.WireError, match="media frames"):
        wire.encode(message, media)


def test_media_bytes_are_passed_on_untouched_and_uncopied_into_the_message() -> None:
    image = bytes(range(256)) * 4
    body, frame = wire.encode(with_images(1), [image])
    assert frame is image
    assert image not in body
    assert len(body) < 200
