"""Tool-call arguments as the model wrote them, complete or not, become an object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from broker.dialects.messages.arguments import object_of


def read(arguments: str) -> Any:
    return json.loads(bytes(object_of(arguments)))


keys = st.text('ab"\\{}é🚂', max_size=4)
numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False, width=16)
values = st.recursive(
    st.none() | st.booleans() | numbers | keys,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(keys, values, max_size=4)


@settings(max_examples=60)
@given(objects, st.booleans(), st.data())
def test_an_object_is_passed_on_as_written_and_cut_short_as_the_sdk_keeps_it(
    value: dict[str, Any], ascii_only: bool, data: st.DataObject
) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=1)
    assert bytes(object_of(written)) == written.encode()
    cut = written[: data.draw(st.integers(1, len(written)))]
    assert read(cut) == from_json(cut.encode(), partial_mode=True)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ("[1, 2]", {}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": tru', {}),
        ('{"a": 1, "b": [true, nul', {"a": 1, "b": [True]}),
        ('{"path": "/etc/hosts", "content": "127.0.0.1 loc', {"path": "/etc/hosts"}),
        ('{"a": [{"b": "c"}, {"d', {"a": [{"b": "c"}, {}]}),
        pytest.param('{"a":' + "[" * 200_000, {}, id="deep"),
    ],
)
def test_whatever_is_written_there_is_an_object(written: str, expected: Any) -> None:
    assert read(written) == expected
