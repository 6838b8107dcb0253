"""Body of OpenAI's chat completions: types, and the checks before dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from broker.dialects.attached_files import FileData
from broker.dialects.body import decode, wrong
from broker.dialects.parameters import MaxTokens, TopLogprobs, check, check_max_tokens
from broker.dialects.parts import Detail
from broker.dialects.response_format import FormParameters, form_of
from broker.dialects.tools import (
    INPUT,
    FunctionTool,
    Named,
    Tool,
    ToolChoice,
    ToolChoicePolicy,
    ToolOffer,
    grant,
    offer,
)


class TextPart(Struct, tag_field="type", tag="text"):
    text: str | None


class ImageURL(Struct):
    url: str
    detail: Detail | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageURL | str


class VideoURL(Struct):
    url: str


class VideoPart(Struct, tag_field="type", tag="video_url"):
    """A video in vLLM's format."""

    video_url: VideoURL | str


class FramesPart(Struct, tag_field="type", tag="video"):
    """A video in the format of Qwen's clients: a file, or its frames as images."""

    video: str | Annotated[list[str], Meta(min_length=1)]


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    refusal: str | None


class ThinkingPart(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an assistant, as Anthropic's and Mistral's clients send it."""

    thinking: str | list[TextPart] = ""


class ReasoningPart(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an assistant, as LangChain and the AI SDK send it."""

    text: str = ""
    reasoning: str = ""


class RedactedThinkingPart(Struct, tag_field="type", tag="redacted_thinking"):
    """Ciphertext of another server, which is passed over."""


class FilePart(Struct, tag_field="type", tag="file"):
    """A file, of which only text can be read."""

    file: FileData


class AudioPart(Struct, tag_field="type", tag="input_audio"):
    """Audio, which is refused by name."""


class AudioURLPart(Struct, tag_field="type", tag="audio_url"):
    """Audio in vLLM's format, which is refused by name."""


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class CustomInput(Struct):
    """Call of a custom tool."""

    name: str
    input: str = ""


class ToolCall(Struct):
    """A call in an answer. One of a custom tool is read as that of the function that stands for it."""

    function: FunctionCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    custom: CustomInput | None = None

    def __post_init__(self) -> None:
        if self.type == "custom" and self.custom is not None:
            self.function = FunctionCall(self.custom.name, {INPUT: self.custom.input})
        if self.function is None:
            raise ValueError(f"Object missing required field `{self.type}`")


ContentPart = (
    TextPart
    | ImagePart
    | VideoPart
    | FramesPart
    | RefusalPart
    | FilePart
    | AudioPart
    | AudioURLPart
    | ThinkingPart
    | ReasoningPart
    | RedactedThinkingPart
)


class Message(Struct):
    """A message. Parts of reasoning are read as `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.content, list):
            return
        parts = ThinkingPart | ReasoningPart | RedactedThinkingPart
        thoughts = [part for part in self.content if isinstance(part, parts)]
        if thoughts and self.role != "assistant":
            raise ValueError("Parts of reasoning are only allowed in messages with role 'assistant'")
        self.content = [part for part in self.content if not isinstance(part, parts)]
        if not self.reasoning_content and not self.reasoning:
            self.reasoning_content = "\n\n".join(filter(None, map(_thought, thoughts))) or None


def _thought(part: ContentPart) -> str:
    match part:
        case ThinkingPart(str(text)):
            return text
        case ThinkingPart([*texts]):
            return "".join(text.text or "" for text in texts)
        case ReasoningPart(text, reasoning):
            return text or reasoning
    return ""


class Prediction(Struct):
    """OpenAI's predicted output: text that much of the answer will repeat."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


FunctionChoice = Literal["none", "auto"] | Named
"""Choice of legacy function calling, which `tools` replaced in 2023; at most one call."""


class Body(FormParameters, kw_only=True):
    """Body fields beside the shared ones. Other fields are ignored."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionTool] | None = None
    function_call: FunctionChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None

    @property
    def has_functions(self) -> bool:
        """Whether the body uses legacy function calling."""
        return self.functions is not None or self.function_call is not None

    @property
    def customs(self) -> frozenset[str]:
        """Names of the custom tools, whose calls are returned as such."""
        return frozenset(
            tool.custom.name for tool in self.tools or [] if tool.type == "custom" and tool.custom
        )

    @property
    def offer(self) -> ToolOffer:
        """Tools that may be called, and how. Raises `RequestError` naming the parameter at fault."""
        if self.has_functions:
            functions = self.functions or []
            return grant(functions, _function_policy(functions, self.function_call), single=True)
        return offer(self.tools or [], self.tool_choice, single=self.parallel_tool_calls is False)


def _function_policy(functions: Sequence[FunctionTool], choice: FunctionChoice | None) -> ToolChoicePolicy:
    match choice:
        case None | "auto":
            return ToolChoicePolicy()
        case "none":
            return ToolChoicePolicy(allowed=frozenset())
        case Named(name):
            if name not in [function.name for function in functions]:
                raise wrong("function_call.name", f"is {name[:64]!r}, which is not in 'functions'")
            return ToolChoicePolicy(required=True, name=name)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    check(body)
    check_max_tokens(body, "max_tokens", "max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "requires 'logprobs' to be true")
    for index, message in enumerate(body.messages):
        if message.role == "tool" and not message.tool_call_id:
            raise wrong(f"messages[{index}].tool_call_id", "is required in a tool message")
    if body.has_functions and (body.tools or body.tool_choice):
        raise wrong("functions", "and 'function_call' cannot be combined with 'tools' and 'tool_choice'")
    # Evaluated for their errors only. The results are small, and are computed again at dispatch.
    _ = body.offer, form_of(body)
    return body


class StreamLookup(Struct):
    """Body of llama.cpp's lookup of streams: the client's names of conversations."""

    conversation_ids: list[str] = []


_lookup_decoder = msgspec.json.Decoder(StreamLookup)


def read_lookup(raw: bytes) -> StreamLookup:
    """Decode a lookup. Raises `RequestError` naming the parameter at fault."""
    return decode(_lookup_decoder, raw)
