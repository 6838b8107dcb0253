"""Every type of item, block, part and tool that the installed SDKs and the agents know is in the tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import beta as anthropic
from anthropic.types.beta import beta_tool_result_block_param as result
from anthropic.types.beta.beta_memory_tool_20250818_command import (
    BetaMemoryTool20250818Command as MemoryCommand,
)
from anthropic.types.beta.beta_request_tool_addition_block_param import Tool as Added
from openai.types import chat, responses
from openai.types.chat import chat_completion_assistant_message_param as assistant
from openai.types.responses.response_apply_patch_tool_call import OperationUpdateFile as Patch
from openai.types.responses.response_function_shell_tool_call import Action as Shell
from openai.types.responses.response_output_item import LocalShellCallAction as LocalShell

from broker.api.chat import body as chat_body
from broker.api.messages import content as blocks
from broker.api.messages.client_tools import function_of
from broker.api.responses import builtin_tools, content, items
from broker.api.responses import tools as responses_tools
from broker.dialects import tools
from broker.dialects.tools import FunctionTool

CODEX = {"agent_message", "agent_reasoning", "compaction_summary", "context_compaction"}
CODEX |= {"ghost_snapshot", "other"}
CODEX_PARTS = {
    "encrypted_content", "input_text", "input_image", "input_audio", "output_text", "reasoning_text",
}  # fmt: skip
NOT_OFFERED = {
    "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "mcp",
    "programmatic_tool_calling", "web_search", "web_search_2025_08_26", "web_search_preview",
    "web_search_preview_2025_03_11",
}  # fmt: skip
NOT_OFFERED_BY_MESSAGES = {
    "advisor", "browser_toolset", "code_execution", "computer_toolset", "mcp_toolset",
    "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search",
}  # fmt: skip


def types(union: Any) -> Iterator[str]:
    """Yield the values of `type` in an SDK's union."""
    if get_origin(union) is Literal:
        yield from get_args(union)
    elif get_args(union):
        for member in get_args(union):
            yield from types(member)
    elif hasattr(union, "model_fields"):
        yield from types(union.model_fields["type"].annotation)
    elif isinstance(union, type) and "type" in (hints := getattr(union, "__annotations__", {})):
        yield from types(get_type_hints(union)["type"] if hints else None)


def tags(union: Any) -> set[str]:
    """Return the types that a union of ours decodes."""
    return {kind.__struct_config__.tag for kind in get_args(union)}


def fields(function: FunctionTool | None) -> set[str]:
    """Return the parameters of a function."""
    return set(function.parameters["properties"]) if function and function.parameters else set()


MEMORY = {name for kind in get_args(get_args(MemoryCommand)[0]) for name in kind.model_fields}
CHAT_PARTS = {*types(chat.ChatCompletionContentPartParam), *types(assistant.ContentArrayOfContentPart)}
ANTHROPIC_TOOLS = types(anthropic.BetaToolUnionParam)
ANTHROPIC_SERVERS = [kind for kind in ANTHROPIC_TOOLS if not function_of(blocks.Tool("a", kind))]
ITEMS = {*items.ITEMS, *items.PASSED_OVER, *items.REFUSED}
PARTS = {*content.TEXTS, *content.VISUALS, *content.REFUSED, content.FILE}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({*types(responses.ResponseInputItemParam)} | CODEX, ITEMS),
        ({*types(responses.ResponseInputContentParam)} | CODEX_PARTS | PARTS, PARTS),
        ({*types(responses.ToolParam)}, NOT_OFFERED | {"namespace", *responses_tools.CALLABLE}),
        ({*types(chat.ChatCompletionToolUnionParam)}, {kind for kind in tools.CALLABLE if kind}),
        ({*types(chat.ChatCompletionMessageToolCallUnionParam)}, {"function", "custom"}),
        (CHAT_PARTS | tags(chat_body.ContentPart), tags(chat_body.ContentPart) | {"file", "input_audio"}),
        ({*types(anthropic.BetaContentBlockParam), *types(result.Content)}, tags(blocks.Block)),
        ({*types(result.Content)}, tags(blocks.ResultBlock)),
        ({*types(Added)}, tags(get_type_hints(blocks.ToolAdditionBlock)["tool"])),
        ({re.sub(r"_\d{8}", "", kind) for kind in ANTHROPIC_SERVERS}, NOT_OFFERED_BY_MESSAGES),
        ({*Patch.model_fields}, fields(builtin_tools.function_of("apply_patch", {}, ""))),
        ({*Shell.model_fields}, fields(builtin_tools.function_of("shell", {}, ""))),
        ({*LocalShell.model_fields} - {"type"}, fields(builtin_tools.function_of("local_shell", {}, ""))),
        (MEMORY, fields(function_of(blocks.Tool("memory", "memory_20250818")))),
    ],
)  # fmt: skip
def test_every_type_of_the_sdks_and_agents_has_an_entry(theirs: set[str], ours: set[str]) -> None:
    assert theirs == ours
