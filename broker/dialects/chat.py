"""OpenAI chat completions: body -> Generate, and a flight's items -> SSE chunks or one JSON document."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from broker.dialects.body import check_range, decode, encode, encode_text, refuse
from broker.inflight import Item
from broker.normalize import Conversation, normalize
from protocol.errors import KINDS, Code, RequestError, code_named
from protocol.messages import Accepted, Delta, Failed, Finished, Generate, Media, Sampling, Usage

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 1024
SEED_MASK = 2**63 - 1


# --- the body ----------------------------------------------------------------------------------------


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


# --- to the worker -----------------------------------------------------------------------------------


def conversation(asked: Asked, *, system_in_place: bool) -> Conversation:
    """The canonical conversation of a checked request."""
    messages: list[dict[str, Any]] = msgspec.to_builtins(asked.body.messages)
    return normalize(messages, system_in_place=system_in_place)


def generate(
    asked: Asked, messages: list[dict[str, Any]], media: list[Media], *, id: str, incarnation: str
) -> Generate:
    """The message to the worker. A request without a seed gets one here, so that it can be repeated."""
    body = asked.body
    kwargs = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        kwargs.setdefault("enable_thinking", body.enable_thinking)
    seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=Sampling(
            seed=seed,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(body.top_k, 0),
            min_p=body.min_p,
        ),
        messages=messages,
        tools=_offered_tools(body),
        template_kwargs=kwargs,
        media=media,
        stop=asked.stop,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        ignore_eos=bool(body.ignore_eos),
    )


def _offered_tools(body: Body) -> list[dict[str, Any]] | None:
    if body.tool_choice == "none" or not body.tools:
        return None
    offered = []
    for tool in body.tools:
        if tool.type == "function" and tool.function is not None:
            function = {"name": tool.function.name}
            fields = {"description": tool.function.description, "parameters": tool.function.parameters}
            offered.append(
                {
                    "type": "function",
                    "function": function | {k: v for k, v in fields.items() if v is not None},
                }
            )
    return offered or None


# --- to the client -----------------------------------------------------------------------------------


def failure(failed: Failed) -> RequestError:
    """What a flight ended with, as the error its client is told."""
    code = code_named(failed.code)
    retry = 1.0 if KINDS[code].retryable else None
    return RequestError(code, failed.message or None, param=failed.param, retry_after_s=retry)


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "server_error" if error.kind.status >= 500 else "invalid_request_error"
    body = {"message": error.message, "type": kind, "param": error.param, "code": str(error.code)}
    return {"error": body | error.details}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


DONE = b"data: [DONE]\n\n"


class Stream:
    """A flight's items -> server-sent events. The constant part of every chunk is rendered once."""

    content_type = b"text/event-stream; charset=utf-8"
    keepalive = b": keep-alive\n\n"

    def __init__(self, *, id: str, model: str, created: int, include_usage: bool) -> None:
        envelope = encode({"id": id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._head = b"data: " + envelope[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._delta_head = self._head + b'{"index":0,"delta":{"content":'
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._include_usage = include_usage
        self._begun = False

    def feed(self, items: Sequence[Item]) -> bytes:
        """The events of `items`, in order. An error is an event only once something has been sent."""
        if not self._begun and items and isinstance(items[-1], Failed):
            raise failure(items[-1])
        events = b"".join(event for item in items for event in self._events(item))
        self._begun = self._begun or bool(events)
        return events

    def _events(self, item: Item) -> Iterator[bytes]:
        match item:
            case Delta():
                if item.text:
                    yield self._delta_head + encode_text(item.text) + self._delta_tail
            case Accepted():
                yield self._chunk({"role": "assistant", "content": ""}, None)
            case Finished():
                yield self._chunk({}, item.reason)
                if self._include_usage:
                    yield self._head + b'],"usage":' + encode(_usage(item.usage)) + b"}\n\n"
                yield DONE
            case Failed():
                yield b"data: " + encode(error_object(failure(item))) + b"\n\n"
                yield DONE

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._head + encode(choice) + self._tail


class Whole:
    """A flight's items -> one JSON document."""

    content_type = b"application/json"
    keepalive = b""

    def __init__(self, *, id: str, model: str, created: int) -> None:
        self._envelope = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._text: list[str] = []

    def feed(self, items: Sequence[Item]) -> bytes:
        """The document once it is complete, nothing before."""
        for item in items:
            match item:
                case Delta():
                    self._text.append(item.text)
                case Finished():
                    return self._document(item)
                case Failed():
                    raise failure(item)
        return b""

    def _document(self, finished: Finished) -> bytes:
        message = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished.reason}
        return encode(self._envelope | {"choices": [choice], "usage": _usage(finished.usage)})
