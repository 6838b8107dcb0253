"""Resent requests: an answer that another worker began continues where it stopped."""

from __future__ import annotations

import pytest

from protocol.messages import Finished
from protocol.types import CallDelta
from tests.scripted_worker.script import Script
from tests.scripted_worker.text import FakePipeline
from tests.worker.engines import END, House, ScriptedEngine, ScriptedPipeline
from worker.values import CacheSpec


def test_the_answer_goes_on_behind_what_was_said() -> None:
    house = House()
    house.submit("a", 11, 12, 13, 14, resume=(11, 12))
    house.run()
    assert house.tokens("a") == [13, 14, END]
    assert house.text("a") == "<13><14>"
    end = house.end("a")
    assert isinstance(end, Finished)
    assert end.usage.completion_tokens == 5


def test_text_that_was_held_back_is_still_there() -> None:
    house = House(pipelines={"a": lambda: ScriptedPipeline(held=12)})
    house.submit("a", 11, 12, 13, resume=(11, 12))
    house.run()
    assert house.text("a") == "<12><13>"


@pytest.mark.parametrize("resumed", [1, 3])
def test_a_thought_goes_on_where_it_was_and_is_counted_whole(resumed: int) -> None:
    house = House(pipelines={"a": lambda: FakePipeline(Script(think=2))})
    script = (1, 2, 3)
    house.submit("a", *script, resume=script[:resumed])
    house.run()
    thoughts = [delta.reasoning for delta in house.deltas("a")]
    texts = [delta.text for delta in house.deltas("a")]
    assert thoughts == ["steam ", "signal ", "", ""][resumed:]
    assert texts == ["", "", "turntable ", ""][resumed:]
    end = house.end("a")
    assert isinstance(end, Finished)
    assert (end.usage.completion_tokens, end.usage.reasoning_tokens) == (4, 2)


@pytest.mark.parametrize("resumed", [0, 2, 5, 8, 13])
def test_a_call_goes_on_where_it_was_and_is_told_once(resumed: int) -> None:
    house = House(pipelines={"a": lambda: FakePipeline(Script(call=2), "a~2")})
    script = (*range(1, 10), 1, 2, 3, 4)
    house.submit("a", *script, resume=script[:resumed])
    house.run()
    calls = [
        CallDelta(index=0, id="call_a_0", name="note", arguments='{"words": "'),
        *(CallDelta(index=0, arguments=f"{word} ") for word in ("wagon", "tender", "駅")),
        CallDelta(index=0, arguments='🚂 "}'),
        CallDelta(index=1, id="call_a_1", name="note", arguments='{"words": "'),
        *(CallDelta(index=1, arguments=f"{word} ") for word in ("rails", "steam", "signal")),
        CallDelta(index=1, arguments='turntable "}'),
    ]
    expected = [[], [], *([call] for call in calls), [], []]
    assert [delta.calls for delta in house.deltas("a")] == expected[resumed:]
    texts = ["steam ", "signal ", *[""] * 10, "wagon ", ""]
    assert [delta.text for delta in house.deltas("a")] == texts[resumed:]
    assert house.reason("a") == "tool_calls"


@pytest.mark.parametrize(
    ("resume", "max_tokens", "stop", "reason"),
    [((11, END), 99, None, "stop"), ((11, 12), 2, None, "length"), ((11, 12), 99, 12, "stop")],
    ids=["end", "length", "stop string"],
)
def test_an_answer_that_was_whole_ends_at_once(
    resume: tuple[int, ...], max_tokens: int, stop: int | None, reason: str
) -> None:
    house = House(pipelines={"a": lambda: ScriptedPipeline(stop=stop)})
    house.submit("a", 11, 12, 13, resume=resume, max_tokens=max_tokens)
    house.run()
    assert (house.tokens("a"), house.text("a"), house.reason("a")) == ([], "", reason)
    assert house.engine.sizes == []


def test_a_pipeline_that_fails_over_it_fails_its_row_alone() -> None:
    house = House(pipelines={"a": lambda: ScriptedPipeline(bad=12)})
    house.submit("a", 11, 12, resume=(11, 12))
    house.submit("b", 21)
    house.run()
    assert house.failed("a")
    assert house.text("b") == "<21>"


def test_resumed_request_reuses_stored_prompt_and_output() -> None:
    house = House(engine=ScriptedEngine(shape=CacheSpec()), store_bytes=10**9)
    script = tuple(range(1, 60))
    house.submit("a", *script, prompt=600, max_tokens=40)
    house.run()
    house.submit("b", *script, like="a", resume=script[:40])
    house.run()
    assert house.tokens("b") == [*script[40:], END]
    assert house.engine.restored["b"] == 639
