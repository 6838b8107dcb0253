"""Custom tools with free-text input: the input is extracted from a call's arguments, however chunked."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects.responses.custom import InputReader
from broker.dialects.responses.output import OutputStyle, ResponseOutput
from protocol.types import CallDelta
from tests.factories import delta

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
STEM = "0123456789abcdef01234567"


def cut(text: str, places: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(place % (len(text) + 1) for place in places), None])]


def read(pieces: list[str]) -> tuple[str, str]:
    """Return the input streamed so far, and the rest at the end."""
    reader = InputReader()
    told = "".join(reader.push(piece) for piece in pieces)
    rest = reader.close()
    assert reader.text == told + rest
    return told, rest


@settings(max_examples=50)
@given(text=TEXTS, place=st.integers(0, 400), end=st.integers(0, 400))
def test_truncated_custom_tool_input_is_streamed_up_to_the_cut(text: str, place: int, end: int) -> None:
    arguments = json.dumps({"input": text})
    arguments = arguments[: len('{"input": "') + end % len(arguments)]
    told, rest = read(cut(arguments, [place]))
    assert (told, rest) == read([arguments])
    assert text.startswith(told)


@pytest.mark.parametrize(
    ("arguments", "told", "rest"),
    [
        (r'{"input":"\ud83d\ude82 \\ud83d \"\u00e9\/"}', '🚂 \\ud83d "é/', ""),
        (r'{"input":"a\ud83d"}', "a?", ""),  # half a surrogate pair is not a character
        (r'{"input":"\ud83d\u0041"}', "?A", ""),
        ('{"patch":"*** Begin"}', "", "*** Begin"),
        ('{"input":5}', "", '{"input":5}'),
        ("{}", "", ""),
        ('{"inp', "", '{"inp'),
        ("", "", ""),
    ],
)
def test_other_arguments_are_told_in_the_end(arguments: str, told: str, rest: str) -> None:
    assert read([arguments]) == (told, rest)
    assert read(list(arguments)) == (told, rest)


@settings(max_examples=50)
@given(text=TEXTS, places=st.lists(st.integers(0, 400), max_size=6), is_ascii=st.booleans())
def test_a_call_streamed_is_the_call_whole(text: str, places: list[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert read(cut(arguments, places)) == (text, "")
    output = ResponseOutput(
        STEM, OutputStyle(customs=frozenset({"patch"}), namespaces={"patch": ("files", "patch")})
    )
    calls = [CallDelta(index=0, id="call_1", name="patch")]
    calls += [CallDelta(index=0, arguments=piece) for piece in cut(arguments, places)]
    deltas = [delta(calls=[call]) for call in calls]
    events = [event for delta in deltas for event in output.take(delta)] + list(output.close(complete=True))
    (item,) = output.items
    assert item == {
        "id": f"ctc_{STEM}_0", "type": "custom_tool_call", "status": "completed", "call_id": "call_1",
        "name": "patch", "namespace": "files", "input": text,
    }  # fmt: skip
    kinds = [event["type"].removeprefix("response.") for event in events]
    grown = [event["delta"] for event in events if "delta" in event]
    assert "".join(grown) == text
    middle = ["custom_tool_call_input.delta"] * len(grown)
    end = ["custom_tool_call_input.done", "output_item.done"]
    assert kinds == ["output_item.added", *middle, *end]
    assert events[0]["item"]["input"] == ""
    assert events[-2]["input"] == text
