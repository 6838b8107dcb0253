"""The `openai` package: chat, completions and responses."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

from checks import ASKED, FUNCTION, KEY, MODEL, V1, WEATHER, Thing, check, main, refused, when
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError, OpenAI

BATCH_S_MAX = 60.0
client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": ASKED}]
tools = [{"type": "function", "function": FUNCTION}]
named = {"type": "function", "function": {"name": "get_weather"}}


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_streamed() -> None:
    asked = {"model": MODEL, "messages": messages, "max_tokens": 200}  # a truncated answer is an error there
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens


@check
def chat_tool() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice=named)
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in WEATHER["properties"]["city"]["enum"]


@check
def chat_tool_streamed() -> None:
    asked = {"model": MODEL, "messages": messages, "tools": tools, "tool_choice": "required"}
    with client.chat.completions.stream(**asked) as stream:
        answer = stream.get_final_completion()
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in WEATHER["properties"]["city"]["enum"]


@check
def chat_structured() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Thing)
    assert isinstance(answer.choices[0].message.parsed, Thing)


@check
def completions() -> None:
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=8).choices[0].text


@check
def completions_streamed() -> None:
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, stream=True)
    assert len([chunk for chunk in stream if chunk.choices[0].text]) > 1


@check
def batch() -> None:
    asked = {"model": MODEL, "messages": messages, "max_tokens": 8}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    file = client.files.create(file=("one.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + BATCH_S_MAX
    while client.batches.retrieve(made.id).status != "completed":
        assert time.monotonic() < deadline, client.batches.retrieve(made.id)
        time.sleep(0.2)
    ended = client.batches.retrieve(made.id)
    (found,) = client.files.content(ended.output_file_id).text.splitlines()
    assert json.loads(found)["response"]["body"]["choices"][0]["message"]["content"]
    assert client.files.delete(ended.output_file_id).deleted


@check
def responses() -> None:
    answer = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=16)
    assert answer.output_text
    assert answer.usage.output_tokens


@check
def responses_streamed() -> None:
    events = list(client.responses.create(model=MODEL, input=ASKED, max_output_tokens=16, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == events[-1].response.output_text != ""


@check
def responses_tool() -> None:
    function = {"type": "function", "strict": True, **FUNCTION}
    answer = client.responses.create(model=MODEL, input=ASKED, tools=[function], tool_choice="required")
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in WEATHER["properties"]["city"]["enum"]


@check
def responses_structured() -> None:
    answer = client.responses.parse(model=MODEL, input=ASKED, text_format=Thing)
    assert isinstance(answer.output_parsed, Thing)


@check
def errors() -> None:
    asked = {"model": "there-is-no-such-model", "messages": messages}
    assert refused(NotFoundError, client.chat.completions.create, **asked).code == "model_not_found"


@when("CAPABLE")
def chat_tool_loop() -> None:
    said = [{"role": "user", "content": "The weather in Rome?"}]
    called = client.chat.completions.create(model=MODEL, messages=said, tools=tools).choices[0]
    (call,) = called.message.tool_calls
    assert called.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    said += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "Sleet."}]
    told = client.chat.completions.create(model=MODEL, messages=said, tools=tools).choices[0]
    assert "Sleet." in told.message.content


@when("EMBED")
def embeddings() -> None:
    found = client.embeddings.create(model=os.environ["EMBED_MODEL"], input=["one", "and another"])
    assert [len(each.embedding) for each in found.data] == [len(found.data[0].embedding)] * 2


@when("AUTH")
def keys() -> None:
    stranger = client.with_options(api_key="sk-of-nobody")
    asked = {"model": MODEL, "messages": messages}
    assert refused(AuthenticationError, stranger.chat.completions.create, **asked).code == "invalid_api_key"


@when("CTX")
def context() -> None:
    long = [{"role": "user", "content": "word " * int(os.environ["CTX"])}]
    asked = {"model": MODEL, "messages": long}
    found = refused(BadRequestError, client.chat.completions.create, **asked)
    assert found.code == "context_length_exceeded"


@when("OVERLOAD_BURST")
def burst() -> None:
    def ask(number: int) -> APIStatusError | None:
        said = [{"role": "user", "content": f"{ASKED} {number}"}]
        try:
            client.chat.completions.create(model=MODEL, messages=said, max_tokens=64)
        except APIStatusError as error:
            return error
        return None

    count = int(os.environ["OVERLOAD_BURST"])
    with ThreadPoolExecutor(count) as threads:
        errors = [error for error in threads.map(ask, range(count)) if error]
    assert 0 < len(errors) < count
    assert all(error.status_code == 503 and error.response.headers["retry-after"] for error in errors)


main()
