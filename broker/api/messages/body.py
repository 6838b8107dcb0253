"""Body of Anthropic's messages: types, and the checks before dispatch.

Unknown fields are ignored, including `cache_control` and fields for Anthropic's own servers, and null means
absent. A content block of unknown type is refused, so that no content is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from broker.api.messages.client_tools import function_of
from broker.api.messages.content import (
    Block,
    CompactionBlock,
    Tool,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReference,
    ToolRemovalBlock,
    UntaggedTextBlock,
)
from broker.dialects.body import decode, wrong
from broker.dialects.parameters import (
    CacheSalt,
    MaxTokens,
    Priority,
    Seed,
    Share,
    StopStrings,
    check_max_tokens,
)
from broker.dialects.reasoning import ReasoningOptions, ReasoningParameters, Thinking, options
from broker.dialects.tools import FunctionTool
from protocol.types import SparsePrefill


class Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Prompt(ReasoningParameters, kw_only=True):
    """Fields that make the prompt: the whole body of a token count."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    system: str | list[UntaggedTextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    @property
    def reasoning_options(self) -> ReasoningOptions:
        """Reasoning options, under any name. Raises `RequestError`."""
        effort = self.output_config.effort if self.output_config else None
        return options(self, output_effort=effort)


def offered_tools(prompt: Prompt) -> list[FunctionTool]:
    """Return the functions that can be called: those of the body, with the changes of its messages.

    A change reorders nothing, so that the prompt keeps its beginning. Raises `RequestError` naming the
    parameter at fault.
    """
    tools: dict[str | None, Tool] = {}
    removed: set[str] = set()
    for tool in prompt.tools or []:
        tools.setdefault(tool.name, tool)
    for place, change in _tool_changes(prompt.messages):
        match change:
            case ToolAdditionBlock(ToolDefinition(tool)):
                _check_name(tool, f"{place}.tool.definition")
                tools[tool.name] = tool
                removed.discard(tool.name or "")
            case ToolAdditionBlock(ToolReference(name)):
                if name not in tools:
                    raise wrong(f"{place}.tool.name", f"is {name[:64]!r}, which is not a tool in 'tools'")
                removed.discard(name)
            case ToolRemovalBlock(ToolReference(name)):
                removed.add(name)
    functions = (function_of(tool) for name, tool in tools.items() if name not in removed)
    return [function for function in functions if function is not None]


def _tool_changes(messages: list[Message]) -> Iterator[tuple[str, ToolAdditionBlock | ToolRemovalBlock]]:
    for index, message in enumerate(messages):
        for number, block in enumerate(message.content or () if not isinstance(message.content, str) else ()):
            place = f"messages[{index}].content[{number}]"
            match block:
                case ToolAdditionBlock() | ToolRemovalBlock():
                    yield place, block
                case CompactionBlock(tool_changes=[*changes]):
                    for step, change in enumerate(changes):
                        yield f"{place}.tool_changes[{step}]", change


class Body(Prompt, kw_only=True):
    """Body of a message request. `output_format` is the legacy form of `output_config.format`. `seed`,
    `priority`, `cache_salt`, `cache_pin`, `sparse_prefill` and `adapter` are extensions, as in OpenAI's
    dialects."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    output_format: OutputFormat | None = None
    seed: Seed | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    cache_pin: bool | None = None
    sparse_prefill: bool | SparsePrefill | None = None
    adapter: str | None = None


_body_decoder = msgspec.json.Decoder(Body)
_prompt_decoder = msgspec.json.Decoder(Prompt)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    _check_prompt(body)
    check_max_tokens(body, "max_tokens")
    return body


def read_prompt(raw: bytes) -> Prompt:
    """Decode and check the body of a token count; other fields are ignored. Raises `RequestError`."""
    prompt = decode(_prompt_decoder, raw)
    _check_prompt(prompt)
    return prompt


def _check_prompt(prompt: Prompt) -> None:
    for index, tool in enumerate(prompt.tools or []):
        _check_name(tool, f"tools[{index}]")
    _check_choice(prompt)
    thinking = prompt.thinking
    if isinstance(thinking, Thinking) and thinking.type == "enabled" and thinking.budget_tokens is None:
        raise wrong("thinking.budget_tokens", "is required when thinking is enabled")
    _ = prompt.reasoning_options  # for its errors; made again at dispatch


def _check_name(tool: Tool, place: str) -> None:
    if function_of(tool) is not None and tool.name is None:
        raise wrong(f"{place}.name", "is required")


def _check_choice(prompt: Prompt) -> None:
    choice, names = prompt.tool_choice, {tool.name for tool in offered_tools(prompt)}
    if choice is None or choice.type not in ("any", "tool"):
        return
    if not names:
        raise wrong("tool_choice", "requires a tool call, but 'tools' has no tool that can be called")
    if choice.type == "tool" and choice.name not in names:
        named = repr((choice.name or "")[:64])
        raise wrong("tool_choice.name", f"is {named}, which is not a tool in 'tools'")
