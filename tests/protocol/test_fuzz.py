"""Short fuzzing run of the decoders; `python -m tests.protocol.fuzz` is the long one."""

from __future__ import annotations

from typing import get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import wire
from protocol.conversation import pack, unpack
from protocol.messages import Generate
from tests.factories import request
from tests.protocol import fuzz
from tests.protocol.samples import DECODERS, UNIONS, golden_frames

FRAMES = 5_000


def test_mutated_frames_decode_to_a_message_or_are_refused() -> None:
    outcomes = fuzz.run(FRAMES, seed=20)
    assert outcomes.total() == 2 * FRAMES
    # A run that refuses every frame, or never decodes some type, would prove little.
    assert outcomes["refused"] > FRAMES // 2
    types = {member.__name__ for union in UNIONS.values() for member in get_args(union)}
    assert types <= outcomes.keys()


_scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_message_with_any_value_in_any_field_decodes_or_is_refused(data: st.DataObject) -> None:
    body, *media = data.draw(st.sampled_from(golden_frames()))
    document = msgspec.msgpack.decode(body)
    for name in data.draw(st.lists(st.sampled_from(sorted(document)), max_size=2)):
        document[name] = data.draw(_values)
    frames = [msgspec.msgpack.encode(document), *media]
    for direction in DECODERS:
        fuzz.check(direction, frames)


@given(_values)
@settings(max_examples=50, deadline=None)
def test_any_json_value_in_a_request_arrives_as_it_was_sent(value: object) -> None:
    packed = pack({"value": value})
    sent = request(template_kwargs=packed)
    arrived, _ = wire.decode_to_worker(wire.encode(sent))
    assert isinstance(arrived, Generate)
    assert wire.encode(arrived) == wire.encode(sent)
    # Compared as encoded: NaN equals nothing, not even itself.
    assert pack(unpack(arrived).options) == packed
