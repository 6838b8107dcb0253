"""What ranks say to each other comes out as it went in, and nothing else is taken."""

from __future__ import annotations

import msgspec
import pytest

from worker.contract import Draw, Targets, ThoughtLimit
from worker.ranks import calls

DRAW = Draw(
    seed=2**63 - 1,
    temperature=0.7,
    logit_bias=((7, -1.5),),
    forced=(1, 2),
    thoughts=ThoughtLimit(8, (1,), (2, 3), is_open=True, calling=4),
)
CALLS: list[calls.Call] = [
    calls.Join(uses_heads=True, has_drafts=True),
    calls.Prove(),
    calls.Prefill({"a": [1, 2], "b": [3]}, {"a": Targets((2, 3), 5)}),
    calls.LeaveOut("a", 32, 64),
    calls.Fork("a", "b"),
    calls.Start("a", [1, 2, 3], 2, DRAW, held=True),
    calls.Step({"a": [4, 5]}),
    calls.CutOut("a", [(0, 512), (512, 600)], True, 7),
    calls.Restore("a", [(7, 0, 512, 512), (8, 512, 600, 80)], 9),
    calls.Restore("a", [], None),
    calls.Drop("a"),
    calls.Reset(),
    calls.LetGo([1, 2, 3]),
]
WORDS: list[calls.Word] = [calls.Here(1, "mac-2"), calls.Read(1), calls.Refused(2, "no such folder", True)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_calls_come_out_as_they_went_in(call: calls.Call) -> None:
    assert calls.decode_call(calls.encode(call)) == call


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_words_come_out_as_they_went_in(word: calls.Word) -> None:
    assert calls.decode_word(calls.encode(word)) == word


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\xa4Halt", calls.encode(WORDS[0])])
def test_what_is_no_call_is_refused(frame: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        calls.decode_call(frame)
