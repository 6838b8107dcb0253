"""The embedded model calls tools that were not in its training, and its output is parsed as calls."""

from __future__ import annotations

import random
from functools import cache

from mlx_lm.tool_parsers.json_tools import parse_tool_call

from protocol.types import Sampling
from recipes.pocket.dialogue import Dialogue
from recipes.pocket.fillers import Fillers
from recipes.pocket.tools import NO_TOOL, tools
from tests.factories import request
from tests.worker.folders import nothing
from tests.worker.output.calls.parsed_answers import ParsedAnswer, grown
from worker.contract.engine import EngineRequest, Model, Preparer
from worker.models.load import ModelLoader

ANSWER_TOKENS_MAX = 120


@cache
def pocket() -> tuple[Model, Preparer]:
    model = ModelLoader(None).load(nothing)
    return model, model.open_preparer(4096)


def held_out(seed: int, *, calls: bool) -> Dialogue:
    """Return a dialogue that was not in the training data; its last turn is to be answered."""
    for attempt in range(1000):
        dialogue = tools(
            Fillers(random.Random(f"{seed} {attempt}"), held_out=True), counts=(2,), questions=(1,)
        )
        last = dialogue.messages[-1]
        if bool(last.get("tool_calls")) == calls and (calls or dialogue.answer == NO_TOOL):
            return dialogue
    raise AssertionError("no dialogue of this kind was found")


def prepare(dialogue: Dialogue) -> EngineRequest:
    asked = request(
        sampling=Sampling(seed=1, temperature=0.0),
        messages=dialogue.messages[:-1],
        tools=dialogue.tools,
        template_kwargs={"enable_thinking": False},
    )
    return pocket()[1].prepare(asked, ())


def answer(engine_request: EngineRequest) -> tuple[ParsedAnswer, bool]:
    """Return the answer, and whether a call was complete."""
    model, _ = pocket()
    engine, output_processor = model.engine, model.open_output_processor(engine_request)
    engine.prefill({"row": engine_request.tokens[:-1]})
    engine.start("row", engine_request.tokens, len(engine_request.tokens), engine_request.sampling)
    growths = []
    try:
        for _ in range(ANSWER_TOKENS_MAX):
            for token in engine.step().tokens.values():
                if token in engine_request.end_tokens:
                    return grown([*growths, output_processor.flush()]), output_processor.has_called
                growths.append(output_processor.push(token))
    finally:
        engine.drop("row")
    raise AssertionError("the answer does not end")


def without_tools(engine_request: EngineRequest) -> EngineRequest:
    """Return the same prompt with tool calls disabled."""
    fields = {name: getattr(engine_request, name) for name in EngineRequest.__slots__}
    return EngineRequest(**fields | {"tools": {}})


def test_tools_never_seen_before_are_called_and_most_of_them_right() -> None:
    right = 0
    for seed in range(3):
        dialogue = held_out(seed, calls=True)
        engine_request = prepare(dialogue)
        said, has_called = answer(engine_request)
        assert has_called
        assert said.text == ""
        assert all(len(id) == len("call_") + 24 for id, _, _ in said.calls)
        plain, nothing_called = answer(without_tools(engine_request))
        assert not nothing_called
        bodies = [part.strip().removeprefix("<tool_call>") for part in plain.text.split("</tool_call>")[:-1]]
        calls = map(parse_tool_call, bodies)
        assert said.parsed() == [(call["name"], call["arguments"]) for call in calls]
        assert {name for name, _ in said.parsed()} <= engine_request.tools.keys()
        expected = [call["function"] for call in dialogue.messages[-1]["tool_calls"]]
        right += said.parsed() == [(call["name"], call["arguments"]) for call in expected]
    assert right >= 2


def test_where_no_tool_fits_none_is_called() -> None:
    said, has_called = answer(prepare(held_out(0, calls=False)))
    assert (said.text, said.calls, has_called) == (NO_TOOL, [], False)
