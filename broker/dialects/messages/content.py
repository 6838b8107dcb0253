"""Content blocks of Anthropic's messages, as clients send them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ImageSource(Struct):
    """Image source of type `base64` or `url`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Struct, tag_field="type", tag="image"):
    source: ImageSource


class DocumentSource(Struct):
    """Document source of type `text` or `content`."""

    type: str
    data: str | None = None
    content: str | list[TextBlock | ImageBlock] | None = None


class DocumentBlock(Struct, tag_field="type", tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    content: list[TextBlock]
    title: str | None = None
    source: str | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    name: str
    id: str
    input: dict[str, Any] | None = None


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    """A tool found by tool search; its definition is in the body like any other."""

    tool_name: str


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: (
        str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] | None
    ) = None
    is_error: bool | None = None


# Blocks that only Anthropic's servers write and can read. They are ignored.


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    pass


class CompactionBlock(Struct, tag_field="type", tag="compaction"):
    pass


class ServerToolUseBlock(Struct, tag_field="type", tag="server_tool_use"):
    pass


class WebSearchBlock(Struct, tag_field="type", tag="web_search_tool_result"):
    pass


class WebFetchBlock(Struct, tag_field="type", tag="web_fetch_tool_result"):
    pass


class CodeExecutionBlock(Struct, tag_field="type", tag="code_execution_tool_result"):
    pass


class BashExecutionBlock(Struct, tag_field="type", tag="bash_code_execution_tool_result"):
    pass


class TextEditorBlock(Struct, tag_field="type", tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchBlock(Struct, tag_field="type", tag="tool_search_tool_result"):
    pass


class McpToolUseBlock(Struct, tag_field="type", tag="mcp_tool_use"):
    pass


class McpToolResultBlock(Struct, tag_field="type", tag="mcp_tool_result"):
    pass


class ContainerUploadBlock(Struct, tag_field="type", tag="container_upload"):
    pass


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | RedactedThinkingBlock
    | CompactionBlock
    | ServerToolUseBlock
    | WebSearchBlock
    | WebFetchBlock
    | CodeExecutionBlock
    | BashExecutionBlock
    | TextEditorBlock
    | ToolSearchBlock
    | McpToolUseBlock
    | McpToolResultBlock
    | ContainerUploadBlock
)
