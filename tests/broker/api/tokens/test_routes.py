"""POST /tokenize and /detokenize."""

from __future__ import annotations

import pytest

from protocol.conversation import unpack
from protocol.messages import Accepted
from protocol.types import TokenizeOptions
from tests.broker.application import House
from tests.factories import accepted, finished

HI = [{"role": "user", "content": "hello"}]


def told(id: str, *tokens: int, pieces: tuple[str, ...] = (), prompt: str = "") -> Accepted:
    taken = {"tokens": [*tokens], "pieces": [*pieces], "prompt": prompt}
    return accepted("w", id, prompt_tokens=len(tokens), **taken)


async def test_a_text_is_taken_apart(house: House) -> None:
    answer = house.post("/tokenize", model="org/model", prompt="Hi there", add_special_tokens=False)
    id = await house.arrived()
    [asked] = house.requests()
    assert asked.prompt == "Hi there"
    assert asked.tokenizing == TokenizeOptions(tokens=True, special=False)
    house.line.say("w", told(id, 5, 6), finished("w", id))
    assert (await answer.end()).json == {
        "count": 2, "max_model_len": 8192, "tokens": [5, 6], "token_strs": None,
    }  # fmt: skip


async def test_a_conversation_is_taken_apart_as_chat_would_run_it(house: House) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    wishes = {"return_token_strs": True, "add_generation_prompt": False}
    answer = house.post("/tokenize", messages=HI, tools=[tool], **wishes)
    id = await house.arrived()
    [asked] = house.requests()
    assert unpack(asked).messages == HI
    assert unpack(asked).tools == [tool]
    assert asked.tokenizing == TokenizeOptions(tokens=True, pieces=True, opens_turn=False)
    house.line.say("w", told(id, 5, pieces=("Hi",)), finished("w", id))
    document = (await answer.end()).json
    assert (document["tokens"], document["token_strs"]) == ([5], ["Hi"])


async def test_tokens_become_text(house: House) -> None:
    answer = house.post("/detokenize", model="", tokens=[5, 6])
    id = await house.arrived()
    [asked] = house.requests()
    assert (asked.tokens, asked.echo, asked.tokenizing) == ([5, 6], True, TokenizeOptions())
    house.line.say("w", told(id, 5, 6, prompt="Hi there"), finished("w", id))
    assert (await answer.end()).json == {"prompt": "Hi there"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ],
)
async def test_a_wrong_body_is_refused_by_name(
    path: str, body: dict[str, object], param: str, house: House
) -> None:
    assert await house.post(path, **body).refusal() == (400, "invalid_request", param)
