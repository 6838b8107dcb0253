"""RPC messages between ranks survive a round trip, and others are refused."""

from __future__ import annotations

import msgspec
import pytest

from worker.ranks import rpc
from worker.values import LogprobTargets, SamplingParams, ThinkingBudget

DRAW = SamplingParams(
    seed=2**63 - 1,
    temperature=0.7,
    logit_bias=((7, -1.5),),
    forced=(1, 2),
    thinking_budget=ThinkingBudget(8, (1,), (2, 3), is_open=True, calling=4),
)
CALLS: list[rpc.Call] = [
    rpc.Join(measures_verify_cost=True),
    rpc.Prove(),
    rpc.Prefill({"a": [1, 2], "b": [3]}, {"a": LogprobTargets((2, 3), 5)}),
    rpc.Expect("a", 9),
    rpc.Fork("a", "b"),
    rpc.StartRow("a", [1, 2, 3], 2, DRAW, held=True),
    rpc.RunStep({"a": [4, 5]}),
    rpc.CutOut("a", [(0, 512), (512, 600)], True, 7),
    rpc.Restore("a", [(7, 0, 512, 512), (8, 512, 600, 80)], 9),
    rpc.Restore("a", [], None),
    rpc.DropRow("a"),
    rpc.Reset(),
    rpc.Release([1, 2, 3]),
]
WORDS: list[rpc.Word] = [rpc.RankUp(1, "mac-2"), rpc.WeightsLoaded(1), rpc.Refused(2, "no such folder", True)]


def test_calls_and_words_come_out_as_they_went_in() -> None:
    assert [rpc.decode_call(rpc.encode(call)) for call in CALLS] == CALLS
    assert [rpc.decode_word(rpc.encode(word)) for word in WORDS] == WORDS


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\xa4Halt", rpc.encode(WORDS[0])])
def test_invalid_call_frame_is_refused(frame: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        rpc.decode_call(frame)
