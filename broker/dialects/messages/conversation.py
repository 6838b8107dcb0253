"""Content blocks -> messages as chat has them, so that both dialects make the same prompt.

What others say in one message is several there: the result of each call, and then what the user has to say.
What the model has said is one: its texts are joined without anything between them, as they were said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from broker.dialects.body import refuse
from broker.dialects.messages.body import (
    Block,
    DocumentBlock,
    ImageBlock,
    ImageSource,
    Message,
    Prompt,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from broker.dialects.normalize import Conversation, normalize
from protocol.errors import Code, RequestError

VOLATILE_HEAD = "x-anthropic-billing-header:"
"""How a block begins that Claude Code puts before its system prompt, another one each time. It is addressed
to Anthropic's servers; in a prompt it would cost whatever is stored of all that follows."""
ERROR = "Error"
"""The result of a call that has failed and says nothing of it."""

Part = dict[str, Any]


def conversation(prompt: Prompt, *, system_in_place: bool) -> Conversation:
    """The canonical conversation of a checked request. Raises `RequestError` for what cannot be read."""
    messages = [*_system(prompt.system or [])]
    for index, message in enumerate(prompt.messages):
        messages += _spoken(message, f"messages[{index}].content")
    return normalize(messages, system_in_place=system_in_place)


def _system(system: str | Sequence[TextBlock]) -> Iterator[dict[str, Any]]:
    if isinstance(system, str):
        yield {"role": "system", "content": system}
    elif texts := [block.text for block in system if not block.text.startswith(VOLATILE_HEAD)]:
        yield {"role": "system", "content": [_text(text) for text in texts]}


def _spoken(message: Message, place: str) -> Iterator[dict[str, Any]]:
    if message.content is None or isinstance(message.content, str):
        yield {"role": message.role, "content": message.content or ""}
    elif message.role == "assistant":
        yield _said(message.content, place)
    else:
        yield from _heard(message.role, message.content, place)


def _said(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    """What the model has thought, said and called."""
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock | ImageBlock | DocumentBlock):
            raise _misplaced(block, f"{place}[{index}]", "user")
    return {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        "reasoning_content": "".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock)),
        "tool_calls": [_call(block) for block in blocks if isinstance(block, ToolUseBlock)],
    }


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _heard(role: str, blocks: Sequence[Block], place: str) -> Iterator[dict[str, Any]]:
    """What the model is told: results first, since they belong to what it has said last."""
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock | ThinkingBlock):
            raise _misplaced(block, f"{place}[{index}]", "assistant")
        if isinstance(block, ToolResultBlock):
            yield _result(block, f"{place}[{index}].content")
        else:
            parts += _parts(block, f"{place}[{index}]")
    if parts:
        yield {"role": role, "content": parts}


def _result(block: ToolResultBlock, place: str) -> dict[str, Any]:
    content: str | list[Part]
    if block.content is None or isinstance(block.content, str):
        content = block.content or ""
    else:
        read = [_parts(inner, f"{place}[{index}]") for index, inner in enumerate(block.content)]
        content = [part for parts in read for part in parts]
    if block.is_error and not content:
        content = ERROR
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _parts(block: Block | ToolReferenceBlock, place: str) -> list[Part]:
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
            return [_text(tool_name)]
        case _:
            return []


def _document(block: DocumentBlock, place: str) -> list[Part]:
    source, head = block.source, [_text(text) for text in (block.title, block.context) if text]
    content = source.data if source.type == "text" else source.content
    if source.type not in ("text", "content") or content is None:
        why = f"is a document of type {source.type[:32]!r}, which is not read here: send its text"
        raise refuse(f"{place}.source", why)
    if isinstance(content, str):
        return [*head, _text(content)]
    read = [_parts(inner, f"{place}.source.content[{index}]") for index, inner in enumerate(content)]
    return [*head, *(part for parts in read for part in parts)]


def _url(source: ImageSource, place: str) -> str:
    if source.type == "url" and source.url is not None:
        return source.url
    if source.type == "base64" and source.data is not None:
        return f"data:{source.media_type or ''};base64,{source.data}"
    raise refuse(place, "must be of type 'base64', with 'data', or of type 'url', with 'url'")


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _misplaced(block: Block, place: str, role: str) -> RequestError:
    kind = block.__struct_config__.tag
    message = f"'{place}' is a {kind} block, which only a message of the {role}'s can have."
    return RequestError(Code.INVALID_REQUEST, message, param=place)
