"""The embedded model calls tools that it has never seen: what it says comes out as calls."""

from __future__ import annotations

import random
from functools import cache

import pytest
from mlx_lm.tool_parsers.json_tools import parse_tool_call

from protocol.conversation import pack
from protocol.messages import Generate
from protocol.parts import Sampling
from recipes.pocket.dialogue import Dialogue
from recipes.pocket.fillers import Fillers
from recipes.pocket.tools import NO_TOOL, tools
from tests.worker.folders import nothing
from tests.worker.output.calls.saying import Said, grown
from worker.contract import Model, Prepared, Preparer
from worker.models.load import ModelLoader

ANSWER_TOKENS_MAX = 120


@cache
def pocket() -> tuple[Model, Preparer]:
    model = ModelLoader(None).load(nothing)
    return model, model.open_preparer(4096)


def held_out(seed: int, *, calls: bool) -> Dialogue:
    """A dialogue that the model was not trained on: its last turn is to be answered."""
    for attempt in range(1000):
        dialogue = tools(
            Fillers(random.Random(f"{seed} {attempt}"), held_out=True), counts=(2,), questions=(1,)
        )
        last = dialogue.messages[-1]
        if bool(last.get("tool_calls")) == calls and (calls or dialogue.answer == NO_TOOL):
            return dialogue
    raise AssertionError("no such dialogue")


def prepare(dialogue: Dialogue) -> Prepared:
    request = Generate(
        incarnation="g",
        id="r",
        sampling=Sampling(seed=1, temperature=0.0),
        messages=pack(dialogue.messages[:-1]),
        tools=pack(dialogue.tools),
        template_kwargs=pack({"enable_thinking": False}),
    )
    return pocket()[1].prepare(request, ())


def answer(prepared: Prepared) -> tuple[Said, bool]:
    """What is said, and whether a call was whole."""
    model, _ = pocket()
    engine, pipeline = model.engine, model.open_pipeline(prepared)
    engine.prefill({"row": prepared.tokens[:-1]})
    engine.start("row", prepared.tokens, len(prepared.tokens), prepared.draw)
    growths = []
    try:
        for _ in range(ANSWER_TOKENS_MAX):
            for token in engine.step().tokens.values():
                if token in prepared.end_tokens:
                    return grown([*growths, pipeline.flush()]), pipeline.has_called
                growths.append(pipeline.push(token))
    finally:
        engine.drop("row")
    raise AssertionError("the answer has no end")


def without_tools(prepared: Prepared) -> Prepared:
    """The same prompt, of whose answer nothing is a call."""
    fields = {name: getattr(prepared, name) for name in Prepared.__slots__}
    return Prepared(**fields | {"tools": {}})


@pytest.mark.parametrize("seed", range(4))
def test_tools_never_seen_before_are_called(seed: int) -> None:
    dialogue = held_out(seed, calls=True)
    prepared = prepare(dialogue)
    said, has_called = answer(prepared)
    assert has_called
    assert said.text == ""
    assert all(len(id) == len("call_") + 24 for id, _, _ in said.calls)
    plain, nothing_called = answer(without_tools(prepared))
    assert not nothing_called
    bodies = [part.strip().removeprefix("<tool_call>") for part in plain.text.split("</tool_call>")[:-1]]
    assert said.parsed() == [(call["name"], call["arguments"]) for call in map(parse_tool_call, bodies)]
    assert {name for name, _ in said.parsed()} <= prepared.tools.keys()


def test_most_of_them_are_the_right_ones() -> None:
    right = 0
    for seed in range(4):
        dialogue = held_out(seed, calls=True)
        expected = [call["function"] for call in dialogue.messages[-1]["tool_calls"]]
        said, _ = answer(prepare(dialogue))
        right += said.parsed() == [(call["name"], call["arguments"]) for call in expected]
    assert right >= 3


def test_where_no_tool_fits_none_is_called() -> None:
    said, has_called = answer(prepare(held_out(0, calls=False)))
    assert (said.text, said.calls, has_called) == (NO_TOOL, [], False)
