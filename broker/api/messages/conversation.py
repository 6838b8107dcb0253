"""Conversion of content blocks to chat messages, so that both dialects make the same prompt.

A user message becomes several: one for each tool result, then the user's content. An assistant message stays
one, unless it has results of tools that ran elsewhere: its texts are concatenated without a separator, as
they were generated. A compaction stands for all before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from broker.api.messages.body import Message, Prompt, offered_tools
from broker.api.messages.client_tools import function_of
from broker.api.messages.content import (
    Block,
    BrowserStateBlock,
    CompactionBlock,
    DocumentBlock,
    ImageBlock,
    ImageSource,
    SearchResultBlock,
    ServerToolResult,
    ServerToolUse,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    UntaggedTextBlock,
)
from broker.dialects.attached_files import text_in
from broker.dialects.body import refuse, wrong
from broker.dialects.foreign import result_text, summary_message
from broker.dialects.normalize import Conversation, normalize
from broker.dialects.tools import defined
from protocol.errors import RequestError

ERROR = "Error"
"""Result of a failed call without content."""

SERVER_SEARCH = "tool_search_tool_"
"""Beginning of the types of Anthropic's own searches for tools."""

Part = dict[str, Any]
LateTools = Mapping[str, str]
"""Definitions of tools for the messages that refer to them, by name."""


def conversation(prompt: Prompt, *, system_in_place: bool) -> Conversation:
    """Return the canonical conversation of a checked body. Raises `RequestError` for unreadable content."""
    messages = [*_system(prompt.system or [])]
    first, late = _first(prompt.messages), late_tools(prompt)
    for index, message in enumerate(prompt.messages[first:], first):
        messages += _spoken(message, f"messages[{index}].content", late)
    return normalize(messages, system_in_place=system_in_place)


def late_tools(prompt: Prompt) -> dict[str, str]:
    """Return the definitions of the tools that are not at the beginning of the prompt, but in the message
    that refers to them or adds them, by name: a tool that is loaded later would change the prompt from its
    start.

    None if no tool would be left at the beginning, or if they wait for a search of Anthropic's servers, which
    does not run here.
    """
    listed = prompt.tools or []
    at_first = {tool.name for tool in listed if not tool.defer_loading and function_of(tool)}
    if any((tool.type or "").startswith(SERVER_SEARCH) for tool in listed):
        return {}
    at_first.update(_loaded(prompt.messages[: _first(prompt.messages) + 1]))
    offered = offered_tools(prompt)
    late = {tool.name: defined(tool) for tool in offered if tool.name not in at_first}
    return late if len(late) < len(offered) else {}


def _loaded(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the names of the tools that messages load."""
    for message in messages:
        for block in message.content or () if not isinstance(message.content, str) else ():
            match block:
                case ToolAdditionBlock():
                    yield _added(block)
                case ToolResultBlock(content=[*inner]):
                    yield from (each.tool_name for each in inner if isinstance(each, ToolReferenceBlock))
                case CompactionBlock(tool_changes=[*changes]):
                    yield from (_added(each) for each in changes if isinstance(each, ToolAdditionBlock))


def _added(block: ToolAdditionBlock) -> str:
    match block.tool:
        case ToolReference(name):
            return name
        case ToolDefinition(tool):
            return tool.name or ""
        case _:
            return ""


def _first(messages: Sequence[Message]) -> int:
    """Return the index of the last compaction, which stands for all before it."""
    return max((index for index, message in enumerate(messages) if _is_compaction(message)), default=0)


def _system(system: str | Sequence[UntaggedTextBlock]) -> Iterator[dict[str, Any]]:
    if isinstance(system, str):
        yield {"role": "system", "content": system}
    elif system:
        yield {"role": "system", "content": [_text(block.text) for block in system]}


def _spoken(message: Message, place: str, late: LateTools) -> Iterator[dict[str, Any]]:
    if message.content is None or isinstance(message.content, str):
        yield {"role": message.role, "content": message.content or ""}
    elif message.role == "assistant":
        yield from _assistant_messages(message.content, place)
    else:
        yield from _user_messages(message.role, message.content, place, late)


def _is_compaction(message: Message) -> bool:
    blocks = message.content
    return isinstance(blocks, list) and any(isinstance(b, CompactionBlock) and b.content for b in blocks)


def _assistant_messages(blocks: Sequence[Block], place: str) -> list[dict[str, Any]]:
    """Convert an assistant message: reasoning, text, tool calls, and results of tools that ran elsewhere."""
    messages: list[dict[str, Any]] = []
    turn: list[Block] = []
    results = {b.tool_use_id: text for b in blocks if isinstance(b, ServerToolResult) and (text := _read(b))}
    for index, block in enumerate(blocks):
        match block:
            case ToolResultBlock() | ImageBlock() | DocumentBlock():
                raise _misplaced(block, f"{place}[{index}]", "user")
            case ToolAdditionBlock() | ToolRemovalBlock():
                raise _misplaced(block, f"{place}[{index}]", "system")
            case CompactionBlock(content=str(summary)) if summary:
                messages, turn = [summary_message(summary)], []
            case ServerToolResult() if block.tool_use_id in results:
                messages += [_turn(turn)] if turn else []
                messages.append(_result_message(block.tool_use_id, results[block.tool_use_id]))
                turn = []
            case ServerToolUse() if block.id not in results:
                pass  # what it found, if anything, is in the text behind it
            case _:
                turn.append(block)
    return [*messages, _turn(turn)] if turn or not messages else messages


def _turn(blocks: Sequence[Block]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "".join(block.text or "" for block in blocks if isinstance(block, TextBlock)),
        "reasoning_content": "".join(b.thinking or "" for b in blocks if isinstance(b, ThinkingBlock)),
        "tool_calls": [_call(block) for block in blocks if isinstance(block, ToolUseBlock | ServerToolUse)],
    }


def _read(result: ServerToolResult) -> str:
    return result_text(result.content)


def _call(block: ToolUseBlock | ServerToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _user_messages(
    role: str, blocks: Sequence[Block], place: str, late: LateTools
) -> Iterator[dict[str, Any]]:
    """Convert a user message: tool results first, since they belong to the preceding assistant message."""
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock | ThinkingBlock):
            raise _misplaced(block, f"{place}[{index}]", "assistant")
        if isinstance(block, ToolResultBlock):
            yield _result(block, f"{place}[{index}].content", late)
        elif isinstance(block, ServerToolResult):
            yield _result_message(block.tool_use_id, _read(block))
        else:
            parts += _parts(block, f"{place}[{index}]", late)
    if parts:
        yield {"role": role, "content": parts}


def _result(block: ToolResultBlock, place: str, late: LateTools) -> dict[str, Any]:
    content: str | list[Part]
    if block.content is None or isinstance(block.content, str):
        content = block.content or ""
    else:
        read = [_parts(inner, f"{place}[{index}]", late) for index, inner in enumerate(block.content)]
        content = [part for parts in read for part in parts]
    if block.is_error and not content:
        content = ERROR
    return _result_message(block.tool_use_id, content)


def _result_message(id: str, content: str | list[Part]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def _parts(block: Block, place: str, late: LateTools) -> list[Part]:
    match block:
        case TextBlock(text):
            return [_text(text)]
        case ImageBlock(source):
            return [{"type": "image_url", "image_url": _url(source, f"{place}.source"), "param": place}]
        case DocumentBlock():
            return _document(block, place)
        case SearchResultBlock():
            found = [part.text for part in block.content]
            return [_text("\n".join(filter(None, [block.title, block.source, *found])))]
        case ToolReferenceBlock(tool_name):
            return [_text(late.get(tool_name, tool_name))]
        case ToolAdditionBlock() if (name := _added(block)) in late:
            return [_text(late[name])]
        case BrowserStateBlock(tabs, changes):
            return [_text(result_text({"tabs": tabs, "state_changes": changes}))]
        case CompactionBlock(content=str(summary)) if summary:
            return [_text(summary_message(summary)["content"])]
        case _:
            return []


def _document(block: DocumentBlock, place: str) -> list[Part]:
    source, head = block.source, [_text(text) for text in (block.title, block.context) if text]
    if source.type == "base64" and source.data is not None:
        return [*head, _text(text_in(source.data, source.media_type or "", f"{place}.source"))]
    content = source.data if source.type == "text" else source.content
    if source.type not in ("text", "content") or content is None:
        why = f"is a document of type {source.type[:32]!r}, which is not supported: send its text"
        raise refuse(f"{place}.source", why)
    if isinstance(content, str):
        return [*head, _text(content)]
    read = [_parts(inner, f"{place}.source.content[{index}]", {}) for index, inner in enumerate(content)]
    return [*head, *(part for parts in read for part in parts)]


def _url(source: ImageSource, place: str) -> str:
    if source.type == "url" and source.url is not None:
        return source.url
    if source.type == "base64" and source.data is not None:
        return f"data:{source.media_type or ''};base64,{source.data}"
    raise refuse(place, "must have type 'base64' with 'data', or type 'url' with 'url'")


def _text(text: str | None) -> Part:
    return {"type": "text", "text": text or ""}


def _misplaced(block: Block, place: str, role: str) -> RequestError:
    kind = block.__struct_config__.tag
    return wrong(place, f"is a {kind} block, which is only allowed in messages with role '{role}'")
