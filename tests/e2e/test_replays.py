"""Answers that come back as history: each cut of each, from each dialect, over each kind of template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from broker.api.responses.content import seal
from tests.broker.asgi import run
from tests.e2e.test_chat_families import ANSWER, DIALECTS, QUESTION, RESULT, Model, ask, read
from tests.models.chat_families import BESIDE, FAMILIES, NAME, THOUGHT

KINDS = {
    "iterates": "Qwen 3.5 to 3.8", "concatenates": "DeepSeek R1", "branches on null": "DeepSeek V3",
    "loads text": "DeepSeek V3.2", "has heads": "gpt-oss", "has several tokens in a marker": "Kimi K3",
    "has no calls": "Gemma 2", "has short ids": "Mistral",
}  # fmt: skip
CHAT, MESSAGES, RESPONSES = DIALECTS
WAYS = [(dialect, whole) for dialect in DIALECTS for whole in (True, False)]
USER = {"role": "user", "content": QUESTION}


def results(dialect: str, ids: list[str]) -> list[Any]:
    return [json.loads(json.dumps(DIALECTS[dialect][1]).replace("ID", id)) for id in ids]


async def replay(model: Model, dialect: str, history: list[Any], *shown: str, **more: Any) -> None:
    """Ask again behind a history, and check that the prompt has what is `shown`."""
    asking = asyncio.ensure_future(ask(model.house.app, dialect, [*history, USER], whole=True, **more))
    prompt = await model.answer(len(model.house.requests()), ANSWER, "", whole=True)
    assert ANSWER in read(await asking)[0][1]
    assert [part for part in (*shown, QUESTION) if part not in prompt] == []


async def replay_cut(model: Model, dialect: str, count: int, *, whole: bool) -> None:
    """Cut an answer, send it back with a result for each of its calls, and check what the model reads."""
    family = model.family
    asking = asyncio.ensure_future(ask(model.house.app, dialect, [USER], whole=whole))
    number = len(model.house.requests())
    await model.answer(number, BESIDE, family.writes * 2, whole=whole, max_tokens=count)
    texts, calls, back = read(answer := await asking)
    assert (family.is_bare and not calls) or not any(part in "".join(texts) for part in (NAME, '"'))
    behind = results(dialect, [call["id"] for call in calls])
    is_omitted = calls and (family.omits == "beside" or family.is_bare)
    shown = ["" if is_omitted else texts[1].strip(), *[NAME, RESULT] * bool(calls)]
    if calls and dialect != MESSAGES and "takes_cut_text=False" not in model.layout:
        shown.append(calls[-1]["arguments"])
    if dialect == RESPONSES and count % 2:
        await replay(model, dialect, behind, *shown, previous_response_id=answer.id)
    else:
        await replay(model, dialect, [USER, *back, *behind], *shown)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_cut_at_any_token_is_accepted_as_history(kind: str, tmp_path: Path) -> None:
    model = Model(FAMILIES[KINDS[kind]], tmp_path)
    said = model.family.said.format(THOUGHT, BESIDE) + model.family.writes
    one, two = (len(model.tokenizer.encode(each)) for each in (said, said + model.family.writes))
    for count in (*range(one), *range(one, two, 5)):
        dialect, whole = WAYS[count % len(WAYS)]
        run(replay_cut(model, dialect, count, whole=whole))
    model.house.close()


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"{kind}_1", "status": "incomplete", **more}


ARGUMENTS = [
    "null",
    "[]",
    "{oops",
    '{"a": 123456789012345678901234567890}',
    '{"a": 1e999}',
    '{"a": "\\ud83d"}',
]
ANSWERS: dict[str, list[list[Any]]] = {
    CHAT: [
        *([called(arguments), *results(CHAT, ["c"])] for arguments in [*ARGUMENTS, {"a": 10**30}]),
        [{"role": "assistant", "content": None, "refusal": "No."}], [{"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": "", "reasoning_content": "I m", "reasoning": "I m"}],
        [{"role": "assistant", "content": None, "function_call": {"name": NAME, "arguments": '{"a'}},
         {"role": "function", "name": NAME, "content": RESULT}],
    ],
    MESSAGES: [
        *([{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": NAME, "input": given}]},
           *results(MESSAGES, ["c"])] for given in ({}, {"a": 10**30}, {"a": [{}]})),
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "I m", "signature": "rh1_0"}]}],
        [{"role": "assistant", "content": []}], [{"role": "assistant", "content": ""}],
    ],
    RESPONSES: [
        *([item("function_call", call_id="c", name=NAME, arguments=arguments), *results(RESPONSES, ["c"])]
          for arguments in ARGUMENTS),
        [item("custom_tool_call", call_id="c", name=NAME, input='{"a'), *results(RESPONSES, ["c"])],
        [item("message", role="assistant", content=[{"type": "output_text", "text": ""}])],
        [item("message", role="assistant", content=[{"type": "refusal", "refusal": "No."}])],
        [item("reasoning", summary=[], encrypted_content=seal("I m"))],
        [item("compaction", encrypted_content=seal("They met."))],
    ],
}  # fmt: skip
"""Answers of every kind, of ours and of other servers."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_any_kind_is_accepted_as_history(kind: str, tmp_path: Path) -> None:
    model = Model(FAMILIES[KINDS[kind]], tmp_path)
    for dialect, answers in ANSWERS.items():
        for answer in answers:
            run(replay(model, dialect, [USER, *answer]))
    model.house.close()
