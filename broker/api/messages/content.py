"""Content blocks of Anthropic's messages, as clients send them.

Nothing that carries tools, a task or text is passed over: `Block` is the whole list, and a block of any other
type is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct

from broker.dialects.tools import ToolName


class Tool(Struct):
    """A tool. `defer_loading`: it is in the prompt only where a message refers to it. `display_width_px`,
    `display_height_px`, `enable_zoom`: of type `computer_…`."""

    name: ToolName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    display_width_px: int | None = None
    display_height_px: int | None = None
    enable_zoom: bool | None = None


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str | None


class UntaggedTextBlock(Struct):
    """A block where only those of text are allowed."""

    text: str | None
    type: Literal["text"] = "text"


class ImageSource(Struct):
    """Image source of type `base64` or `url`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Struct, tag_field="type", tag="image"):
    source: ImageSource


class DocumentSource(Struct):
    """Document source of type `text`, `content`, or `base64` with text."""

    type: str
    media_type: str | None = None
    data: str | None = None
    content: str | list[TextBlock | ImageBlock] | None = None


class DocumentBlock(Struct, tag_field="type", tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    content: list[UntaggedTextBlock]
    title: str | None = None
    source: str | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str | None
    signature: str | None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    name: str
    id: str
    input: dict[str, Any] | None = None


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    """A tool found by tool search, whose definition is in the body."""

    tool_name: str


class BrowserStateBlock(Struct, tag_field="type", tag="browser_state"):
    """Tabs of a client's browser."""

    tabs: list[dict[str, Any]] = []
    state_changes: list[dict[str, Any]] | None = None


ResultBlock = (
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | BrowserStateBlock
)


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


# --- changes of the tools ----------------------------------------------------------------------------


class ToolReference(Struct, tag_field="type", tag="tool_reference"):
    """A tool of the body, or one that was defined earlier."""

    name: str


class ToolDefinition(Struct, tag_field="type", tag="tool_definition"):
    definition: Tool


class McpToolReference(Struct, tag_field="type", tag="mcp_tool_reference"):
    """A tool that only Anthropic's servers can run, and that is never offered."""


class McpToolsetReference(Struct, tag_field="type", tag="mcp_toolset_reference"):
    """Tools that only Anthropic's servers can run, and that are never offered."""


class ToolAdditionBlock(Struct, tag_field="type", tag="tool_addition"):
    """A tool that is offered from here on."""

    tool: ToolReference | ToolDefinition | McpToolReference | McpToolsetReference


class ToolRemovalBlock(Struct, tag_field="type", tag="tool_removal"):
    """A tool that is no longer offered."""

    tool: ToolReference | McpToolReference | McpToolsetReference


class CompactionBlock(Struct, tag_field="type", tag="compaction"):
    """Summary that stands for all before it. `content`: None if the compaction failed. `tool_changes`: what
    the blocks that it replaces have changed."""

    content: str | None = None
    tool_changes: list[ToolAdditionBlock | ToolRemovalBlock] | None = None


# --- calls that ran at Anthropic's servers -----------------------------------------------------------


class ServerToolUse(Struct):
    """Call of a tool that ran at Anthropic's servers."""

    name: str
    id: str
    input: dict[str, Any] | None = None


class ServerToolUseBlock(ServerToolUse, tag_field="type", tag="server_tool_use"):
    pass


class McpToolUseBlock(ServerToolUse, tag_field="type", tag="mcp_tool_use"):
    pass


class ServerToolResult(Struct):
    """Result of such a call. Its text is read whatever its form."""

    tool_use_id: str
    content: Any = None


class AdvisorResultBlock(ServerToolResult, tag_field="type", tag="advisor_tool_result"):
    pass


class WebSearchBlock(ServerToolResult, tag_field="type", tag="web_search_tool_result"):
    pass


class WebFetchBlock(ServerToolResult, tag_field="type", tag="web_fetch_tool_result"):
    pass


class CodeExecutionBlock(ServerToolResult, tag_field="type", tag="code_execution_tool_result"):
    pass


class BashExecutionBlock(ServerToolResult, tag_field="type", tag="bash_code_execution_tool_result"):
    pass


class TextEditorBlock(ServerToolResult, tag_field="type", tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchBlock(ServerToolResult, tag_field="type", tag="tool_search_tool_result"):
    pass


class McpToolResultBlock(ServerToolResult, tag_field="type", tag="mcp_tool_result"):
    pass


# --- blocks without tools, task or text --------------------------------------------------------------


class PassedOver(Struct):
    """A block that is passed over. `carries`: what it has instead."""

    carries: ClassVar[str]


class RedactedThinkingBlock(PassedOver, tag_field="type", tag="redacted_thinking"):
    carries = "ciphertext of Anthropic's"


class ContainerUploadBlock(PassedOver, tag_field="type", tag="container_upload"):
    carries = "the id of a file for Anthropic's container"


class FallbackBlock(PassedOver, tag_field="type", tag="fallback"):
    carries = "the names of two models"


class McpToolListingBlock(PassedOver, tag_field="type", tag="mcp_tool_listing"):
    carries = "tools that only Anthropic's servers can run"


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | BrowserStateBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
    | CompactionBlock
    | ServerToolUseBlock
    | McpToolUseBlock
    | AdvisorResultBlock
    | WebSearchBlock
    | WebFetchBlock
    | CodeExecutionBlock
    | BashExecutionBlock
    | TextEditorBlock
    | ToolSearchBlock
    | McpToolResultBlock
    | RedactedThinkingBlock
    | ContainerUploadBlock
    | FallbackBlock
    | McpToolListingBlock
)
