"""The body of OpenAI's chat completions: types, and what is checked before a worker is asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from broker.dialects import functions as legacy
from broker.dialects.body import check_range, decode
from broker.dialects.forms import FormParameters, form_of
from broker.dialects.parameters import TOP_LOGPROBS_MAX, check
from broker.dialects.parts import Detail
from broker.dialects.tools import FunctionTool, Offer, Tool, ToolChoice, offer
from protocol.errors import Code, RequestError

THINKING_BUDGET_TOKENS_MAX = 2**31


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class ImageURL(Struct):
    url: str
    detail: Detail | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageURL | str


class VideoURL(Struct):
    url: str


class VideoPart(Struct, tag_field="type", tag="video_url"):
    """As vLLM has it."""

    video_url: VideoURL | str


class FramesPart(Struct, tag_field="type", tag="video"):
    """As Qwen's own clients have it: a file, or its frames as images."""

    video: str | Annotated[list[str], Meta(min_length=1)]


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
    content: str | list[TextPart | ImagePart | VideoPart | FramesPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class Prediction(Struct):
    """What much of the answer will be, as OpenAI has it."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Body(FormParameters, kw_only=True):
    """What is read of the body, beside what the dialects share."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionTool] | None = None
    function_call: legacy.FunctionChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    prediction: Prediction | None = None

    @property
    def thought_tokens_max(self) -> int | None:
        """How many tokens a thought may have, by the one of its names that is nearest to the template."""
        told = (self.chat_template_kwargs or {}).get("thinking_budget")
        budgets = (told, self.thinking_budget, self.thinking_token_budget)
        return next((budget for budget in budgets if budget is not None), None)

    @property
    def has_functions(self) -> bool:
        """It is from before there were tools."""
        return self.functions is not None or self.function_call is not None

    @property
    def offer(self) -> Offer:
        """Which tools may be called, and how. Raises `RequestError` naming the parameter at fault."""
        if self.has_functions:
            return legacy.offer(self.functions or [], self.function_call)
        return offer(self.tools or [], self.tool_choice, single=self.parallel_tool_calls is False)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Bytes -> a checked body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if not body.messages:
        raise RequestError(Code.INVALID_REQUEST, "'messages' must not be empty.", param="messages")
    check(body)
    check_range("max_completion_tokens", body.max_completion_tokens, 1, 2**31)
    _check_thinking(body)
    _check_logprobs(body)
    _check_tool_messages(body)
    if body.has_functions and (body.tools or body.tool_choice):
        message = "'functions' and 'function_call' are what 'tools' and 'tool_choice' replaced: send either."
        raise RequestError(Code.INVALID_REQUEST, message, param="functions")
    # For what they raise: what they find is small, and found again once there is a worker.
    _ = body.offer, form_of(body)
    return body


def _check_thinking(body: Body) -> None:
    told = (body.chat_template_kwargs or {}).get("thinking_budget")
    param = "chat_template_kwargs.thinking_budget"
    if told is not None and type(told) is not int:
        raise RequestError(Code.INVALID_REQUEST, f"'{param}' must be an integer.", param=param)
    budgets = {
        param: told,
        "thinking_budget": body.thinking_budget,
        "thinking_token_budget": body.thinking_token_budget,
    }
    for name, budget in budgets.items():
        check_range(name, budget, 1, THINKING_BUDGET_TOKENS_MAX)


def _check_logprobs(body: Body) -> None:
    check_range("top_logprobs", body.top_logprobs, 0, TOP_LOGPROBS_MAX)
    if body.top_logprobs and not body.logprobs:
        message = "'top_logprobs' needs 'logprobs' to be true."
        raise RequestError(Code.INVALID_REQUEST, message, param="top_logprobs")


def _check_tool_messages(body: Body) -> None:
    for index, spoken in enumerate(body.messages):
        if spoken.role == "tool" and not spoken.tool_call_id:
            param = f"messages[{index}].tool_call_id"
            raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required in a tool message.", param=param)
