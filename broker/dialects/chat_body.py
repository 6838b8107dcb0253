"""The body of OpenAI's chat completions: types, and what is checked before a worker is asked."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from broker.dialects.body import check_range, decode, refuse
from protocol.errors import Code, RequestError

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 1024


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class ImageURL(Struct):
    url: str
    detail: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageURL | str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    refusal: str


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | ImagePart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionTool(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct):
    """Tools of other types than function (a client's own web search, say) are tolerated and not offered."""

    type: str = "function"
    function: FunctionTool | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]


class Body(Struct):
    """What is read of the body. Unknown fields are skipped and null means absent, as every client expects."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None


_body_decoder = msgspec.json.Decoder(Body)


class Asked(Struct, frozen=True):
    """A checked body: everything about the request but the worker it goes to."""

    body: Body
    stop: list[str]
    stream: bool
    include_usage: bool


def read(raw: bytes) -> Asked:
    """Bytes -> a checked request. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if not body.messages:
        raise RequestError(Code.INVALID_REQUEST, "'messages' must not be empty.", param="messages")
    _check_numbers(body)
    _check_tools(body)
    _refuse_unserved(body)
    options = body.stream_options or StreamOptions()
    return Asked(
        body=body,
        stop=_stop_strings(body.stop),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
    )


def _check_numbers(body: Body) -> None:
    check_range("temperature", body.temperature, 0, 2)
    check_range("top_p", body.top_p, 0, 1)
    check_range("min_p", body.min_p, 0, 1)
    check_range("top_k", body.top_k, -1, 2**31)
    check_range("seed", body.seed, -(2**63), 2**63 - 1)
    check_range("max_tokens", body.max_tokens, 1, 2**31)
    check_range("max_completion_tokens", body.max_completion_tokens, 1, 2**31)
    check_range("presence_penalty", body.presence_penalty, -2, 2)
    check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    check_range("n", body.n, 1, 128)


def _check_tools(body: Body) -> None:
    for index, tool in enumerate(body.tools or []):
        if tool.type == "function" and tool.function is None:
            param = f"tools[{index}].function"
            raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required.", param=param)
    if body.tool_choice not in (None, "none", "auto"):
        if not body.tools:
            message = "'tool_choice' is set, but there are no 'tools'."
            raise RequestError(Code.INVALID_REQUEST, message, param="tool_choice")
        raise refuse("tool_choice", "can be 'auto' or 'none' here; forcing a call is not served yet")
    for index, spoken in enumerate(body.messages):
        if spoken.role == "tool" and not spoken.tool_call_id:
            param = f"messages[{index}].tool_call_id"
            raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required in a tool message.", param=param)


def _refuse_unserved(body: Body) -> None:
    if (body.n or 1) > 1:
        raise refuse("n", "can only be 1 here")
    if body.response_format is not None and body.response_format.type != "text":
        raise refuse("response_format", "can only be of type 'text' here: other formats are not enforced yet")
    if body.logprobs or body.top_logprobs:
        raise refuse("logprobs" if body.logprobs else "top_logprobs", "is not served yet")
    if body.logit_bias:
        raise refuse("logit_bias", "is not served yet")
    for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
        if getattr(body, name) not in (None, neutral):
            raise refuse(name, f"can only be {neutral} here: penalties are not served yet")


def _stop_strings(stop: str | list[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else list(stop or [])
    if len(strings) > STOP_STRINGS_MAX:
        raise RequestError(
            Code.INVALID_REQUEST, f"'stop' can hold at most {STOP_STRINGS_MAX} strings.", param="stop"
        )
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= STOP_STRING_CHARACTERS_MAX:
            limit = f"1 to {STOP_STRING_CHARACTERS_MAX} characters"
            raise RequestError(
                Code.INVALID_REQUEST, f"'stop[{index}]' must have {limit}.", param=f"stop[{index}]"
            )
    return strings
