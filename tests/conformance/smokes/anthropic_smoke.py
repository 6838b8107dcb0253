"""The `anthropic` package: messages."""

from __future__ import annotations

import time

from anthropic import Anthropic, NotFoundError
from checks import ASKED, BASE, KEY, MODEL, WEATHER, Thing, check, main, refused

BATCH_S_MAX = 60.0
client = Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": ASKED}]
asked = {"model": MODEL, "messages": messages, "max_tokens": 200}
tools = [{"name": "get_weather", "description": "The weather in a city", "input_schema": WEATHER}]


@check
def plain() -> None:
    answer = client.messages.create(**asked)
    assert answer.content[0].text
    assert answer.usage.output_tokens


@check
def streamed() -> None:
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        whole = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == "".join(block.text for block in whole.content if block.type == "text")


@check
def tool() -> None:
    answer = client.messages.create(**asked, tools=tools, tool_choice={"type": "tool", "name": "get_weather"})
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input["city"] in WEATHER["properties"]["city"]["enum"]
    assert answer.stop_reason == "tool_use"


@check
def tool_streamed() -> None:
    with client.messages.stream(**asked, tools=tools, tool_choice={"type": "any"}) as stream:
        answer = stream.get_final_message()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input["city"] in WEATHER["properties"]["city"]["enum"]


@check
def structured() -> None:
    assert isinstance(client.messages.parse(**asked, output_format=Thing).parsed_output, Thing)


@check
def batch() -> None:
    made = client.messages.batches.create(requests=[{"custom_id": "one", "params": asked}])
    deadline = time.monotonic() + BATCH_S_MAX
    while client.messages.batches.retrieve(made.id).processing_status != "ended":
        assert time.monotonic() < deadline, client.messages.batches.retrieve(made.id)
        time.sleep(0.2)
    (found,) = client.messages.batches.results(made.id)
    assert found.result.message.content[0].text
    assert client.messages.batches.delete(made.id).type == "message_batch_deleted"


@check
def count() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens


@check
def errors() -> None:
    error = refused(NotFoundError, client.messages.create, **asked | {"model": "there-is-no-such-model"})
    assert error.body["error"]["type"] == "not_found_error"


main()
