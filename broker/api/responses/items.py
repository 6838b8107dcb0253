"""Conversion of conversation items to chat messages, so that both dialects make the same prompt.

One assistant turn is a single chat message but several items: reasoning, texts and tool calls. Nothing that
carries tools, a task or text is passed over: `ITEMS`, `PASSED_OVER` and `REFUSED` are the whole list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from broker.api.responses.body import Text
from broker.api.responses.builtin_tools import CALL_ITEMS, SEARCH
from broker.api.responses.content import (
    VISUALS,
    Content,
    RawPart,
    content_of,
    plain_text,
    text_of,
    unseal,
    wrong,
)
from broker.api.responses.tools import PlacedTools, definition_lines, flat_name
from broker.dialects.body import convert
from broker.dialects.foreign import result_text, summary_message
from broker.dialects.reasoning import Reasoning
from broker.dialects.tools import INPUT

Item = Mapping[str, Any]
TRIGGER = "compaction_trigger"
"""Item at the end of the input that asks for a compaction, which `compaction` reads."""

_OURS = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})_[0-9]+")


@dataclass(frozen=True, slots=True)
class AssistantPiece:
    """Something that the model generated. `id`: of its item."""

    text: str = ""
    thought: str = ""
    call: dict[str, Any] | None = None
    id: str | None = None


Piece = AssistantPiece | dict[str, Any]
"""What the model generated, or a chat message of another role."""


class InputItem(Struct):
    """An item that is read. `pieces` may be empty: some items only change tools or options."""

    def pieces(self, place: str) -> Iterator[Piece]:
        """Yield what the item adds to the conversation. Raises `RequestError` for invalid content."""
        yield from ()


class Message(InputItem):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[RawPart] | None = None
    id: str | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        if self.role == "assistant":
            yield AssistantPiece(text=text_of(self.content, f"{place}.content"), id=self.id)
        else:
            yield {"role": self.role, "content": content_of(self.content, f"{place}.content")}


class AgentMessage(InputItem):
    """Message between agents of Codex: a task for a sub-agent, or its report."""

    author: str
    recipient: str
    content: str | list[RawPart] | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        head = {"type": "text", "text": f"Message from agent {self.author} to agent {self.recipient}:"}
        content = content_of(self.content, f"{place}.content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield {"role": "user", "content": [head, *parts]}


class Call(InputItem):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    id: str | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        yield _called(self.call_id, flat_name(self.namespace, self.name), self.arguments)


class CustomCall(InputItem):
    """Call of a custom tool, whose input is free text."""

    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None
    id: str | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        yield _called(self.call_id, flat_name(self.namespace, self.name), {INPUT: self.input})


class CallOutput(InputItem):
    """Output of a call. `call_id`: None for one that no call asked for."""

    call_id: str | None = None
    output: str | list[RawPart] | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        yield _result(self.call_id or "", content_of(self.output, f"{place}.output"))


class ToolRecord(NamedTuple):
    """What an item says of a tool that is no function. `name`: of the tool; empty: the item has no call.

    `arguments`, `output`: the fields that have them. One field that is an object is the arguments themselves.
    """

    name: str = ""
    arguments: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


RECORDS: Mapping[str, ToolRecord] = {
    "apply_patch_call": ToolRecord("apply_patch", ("operation",)),
    "apply_patch_call_output": ToolRecord(output=("output", "status")),
    "code_interpreter_call": ToolRecord("code_interpreter", ("code",), ("outputs", "status")),
    "computer_call": ToolRecord("computer", ("action", "actions")),
    "computer_call_output": ToolRecord(output=("output",)),
    "file_search_call": ToolRecord("file_search", ("queries",), ("results",)),
    "local_shell_call": ToolRecord("local_shell", ("action",)),
    "local_shell_call_output": ToolRecord(output=("output",)),
    "mcp_approval_request": ToolRecord("mcp", ("arguments",)),
    "mcp_approval_response": ToolRecord(output=("approve", "reason")),
    "mcp_call": ToolRecord("mcp", ("arguments",), ("output", "error")),
    "program": ToolRecord("program", ("code",)),
    "program_output": ToolRecord(output=("result",)),
    "shell_call": ToolRecord("shell", ("action",)),
    "shell_call_output": ToolRecord(output=("output",)),
    "tool_search_call": ToolRecord(SEARCH, ("arguments",)),
}
"""Items of tools that are no functions, each with a call, its output, or both."""
_FILLED = {f"{tool}_call": form.filled for tool, form in CALL_ITEMS.items()}


class ToolRecordItem(InputItem):
    """Call or output of such a tool, wherever it ran. Which fields it has depends on the tool."""

    type: str
    call_id: str | None = None
    id: str | None = None
    approval_request_id: str | None = None
    name: str | None = None
    server_label: str | None = None
    action: Any = None
    actions: Any = None
    approve: Any = None
    arguments: Any = None
    code: Any = None
    error: Any = None
    operation: Any = None
    output: Any = None
    outputs: Any = None
    queries: Any = None
    reason: Any = None
    result: Any = None
    results: Any = None
    status: Any = None

    def pieces(self, place: str) -> Iterator[Piece]:
        record = RECORDS[self.type]
        output = self._output(record, place)
        if record.name and (output or not record.output):
            name = flat_name(self.server_label, self.name or record.name)
            yield _called(self.call_id or self.id or "", name, self._arguments(record))
        if output or not record.name:
            asked = "" if record.name else self.approval_request_id
            yield _result(self.call_id or asked or self.id or "", output)

    def _arguments(self, record: ToolRecord) -> str | dict[str, Any]:
        sent = {name: value for name in record.arguments if (value := getattr(self, name)) is not None}
        match list(sent.items()):
            case [(_, dict(fields))]:
                filled = _FILLED.get(self.type, {})
                return {
                    name: field
                    for name, field in fields.items()
                    if field is not None and not (name in filled and field == filled[name])
                }
            case [("arguments", str(text))]:
                return text
        return sent

    def _output(self, record: ToolRecord, place: str) -> Content:
        if isinstance(self.output, dict) and str(self.output.get("type")) in VISUALS:
            return content_of([self.output], f"{place}.output")
        return result_text({name: getattr(self, name) for name in record.output})


class AdditionalTools(InputItem):
    """Tools that are offered from here on, as if they were in `tools`."""

    tools: list[dict[str, Any]]


class ToolSearchOutput(AdditionalTools):
    """Result of a tool search: the tools that it found, which are offered from here on and defined here,
    because a change of the tools at the beginning would change the prompt from its start."""

    call_id: str | None = None
    id: str | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        yield _result(
            self.call_id or "", f"Loaded tools:\n{definition_lines(self.tools, f'{place}.') or 'none'}"
        )


class ReasoningText(Struct):
    text: str = ""


class ReasoningItem(InputItem):
    """Reasoning, as far as it can be read: as `encrypted_content`, in full, or as a summary."""

    encrypted_content: str | None = None
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    id: str | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        yield AssistantPiece(thought=self._read(), id=self.id)

    def _read(self) -> str:
        """Return the reasoning; empty if it is unreadable because it comes from another server."""
        if self.encrypted_content and (thought := unseal(self.encrypted_content)) is not None:
            return thought
        return "\n\n".join(part.text for part in self.content or self.summary or [])


class AgentReasoning(InputItem):
    """Reasoning as Codex records it."""

    text: str = ""

    def pieces(self, place: str) -> Iterator[Piece]:
        yield AssistantPiece(thought=self.text)


class CompactionItem(InputItem):
    """Summary of an earlier part of the conversation; none if another server has encrypted it."""

    encrypted_content: str | None = None

    def pieces(self, place: str) -> Iterator[Piece]:
        if self.encrypted_content and (summary := plain_text(self.encrypted_content)):
            yield summary_message(summary)


class ConfigurationUpdate(InputItem):
    """Options that replace those of the request and of earlier updates."""

    reasoning: Reasoning | None = None
    text: Text | None = None


ITEMS: Mapping[str, type[InputItem]] = {
    "additional_tools": AdditionalTools,
    "agent_message": AgentMessage,
    "agent_reasoning": AgentReasoning,
    "compaction": CompactionItem,
    "compaction_summary": CompactionItem,
    "configuration_update": ConfigurationUpdate,
    "context_compaction": CompactionItem,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": CallOutput,
    "function_call": Call,
    "function_call_output": CallOutput,
    "message": Message,
    "reasoning": ReasoningItem,
    "tool_search_output": ToolSearchOutput,
    **dict.fromkeys(RECORDS, ToolRecordItem),
}
"""Items that are read, by type, and what decodes them."""

PASSED_OVER: Mapping[str, str] = {
    "ghost_snapshot": "the id of a commit in the client's repository",
    "image_generation_call": "a picture that another server made; the model has no use for its prompt",
    "mcp_list_tools": "tools that only another server can run",
    "other": "nothing",
    "web_search_call": "a query; what was found is in the text behind it",
}
"""Items without tools, task or text, by type, and what they carry."""

REFUSED: Mapping[str, str] = {
    TRIGGER: "must be the last item in the 'input' of a response",
    "item_reference": "is only allowed in the 'input' of a response",
}
"""Items that are a 400, by type, and the reason. References are resolved before, in `history`."""


@dataclass(slots=True)
class _Pieces:
    """Text from several items. Items of one response are concatenated, others separated by a blank line."""

    text: str = ""
    last: str = ""

    def add(self, text: str, id: str | None) -> None:
        if not text:
            return
        ours = _OURS.fullmatch(id or "")
        response = ours[1] if ours else ""
        if self.text and not (response and response == self.last):
            self.text += "\n\n"
        self.text += text
        self.last = response


@dataclass(slots=True)
class _Turn:
    """One assistant turn: the consecutive items of the model."""

    thought: _Pieces = field(default_factory=_Pieces)
    content: _Pieces = field(default_factory=_Pieces)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": self.content.text,
            "reasoning_content": self.thought.text,
            "tool_calls": self.calls,
        }

    def add(self, piece: AssistantPiece) -> None:
        self.thought.add(piece.thought, piece.id)
        self.content.add(piece.text, piece.id)
        if piece.call is not None:
            self.calls.append(piece.call)


Placed = tuple[str, Item]
"""The place of an item in the body, such as `input[2]`, and the item."""


def messages(items: Sequence[Placed]) -> list[dict[str, Any]]:
    """Return the items as chat messages. Raises `RequestError` for an invalid item.

    A compaction stands for all that the model and its tools wrote before it.
    """
    spoken: list[_Turn | dict[str, Any]] = []
    for place, item in read(items):
        if isinstance(item, CompactionItem) and any(item.pieces(place)):
            spoken = [one for one in spoken if isinstance(one, dict) and one["role"] != "tool"]
        if type(item) is AdditionalTools and any(isinstance(one, _Turn) for one in spoken):
            spoken.append({"role": "system", "content": definition_lines(item.tools, f"{place}.")})
        for piece in item.pieces(place):
            if not isinstance(piece, AssistantPiece):
                spoken.append(piece)
                continue
            if not spoken or not isinstance(turn := spoken[-1], _Turn):
                turn = _Turn()
                spoken.append(turn)
            turn.add(piece)
    return [one.message() if isinstance(one, _Turn) else one for one in spoken]


def additional_tools(items: Sequence[Placed]) -> list[PlacedTools]:
    """Return the tools that items carry, in order. Raises as `messages`."""
    found: list[PlacedTools] = []
    is_answered = False
    for place, item in read(items):
        if isinstance(item, CompactionItem) and any(item.pieces(place)):
            found, is_answered = [tools._replace(is_late=False) for tools in found], False
        elif isinstance(item, AdditionalTools):
            found.append(PlacedTools(f"{place}.", item.tools, is_answered))
        is_answered = is_answered or _is_of_model(item)
    return found


def _is_of_model(item: InputItem) -> bool:
    is_message = isinstance(item, Message) and item.role == "assistant"
    return is_message or isinstance(item, Call | CustomCall | ReasoningItem | AgentReasoning | ToolRecordItem)


def read(items: Sequence[Placed]) -> Iterator[tuple[str, InputItem]]:
    """Decode the items that carry something. Raises `RequestError` for an invalid or unknown item."""
    for place, item in items:
        kind = kind_of(item)
        if kind in ITEMS:
            yield place, convert(item, ITEMS[kind], place)
        elif kind not in PASSED_OVER:
            raise wrong(f"{place}.type", REFUSED.get(kind, f"unknown item type {kind[:64]!r}"))


def kind_of(item: Item) -> str:
    """Return an item's type. Messages and references may lack one."""
    if (kind := item.get("type")) is not None:
        return str(kind)
    return "item_reference" if "role" not in item and "id" in item else "message"


def _called(id: str, name: str, arguments: str | dict[str, Any] | None) -> AssistantPiece:
    function = {"name": name, "arguments": arguments}
    return AssistantPiece(call={"id": id, "type": "function", "function": function})


def _result(id: str, content: Content) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


# --- as they are listed ------------------------------------------------------------------------------


def listed(items: Sequence[Item], stem: str) -> list[dict[str, Any]]:
    """Return input items in the stored and listed form: with type, id and, for messages, content parts.

    Missing ids are made from `stem`.
    """
    return [_listed(item, f"{stem}_i{number}") for number, item in enumerate(items)]


def _listed(item: Item, id: str) -> dict[str, Any]:
    kind = kind_of(item)
    whole = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{id}"}
    if kind == "message" and isinstance(content := item.get("content") or "", str):
        by_assistant = item.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if by_assistant else {"type": "input_text"}
        whole["content"] = [{**part, "text": content}]
    return whole if kind == "reasoning" else {"status": "completed", **whole}


_PREFIXES = {
    "compaction": "cmp",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "function_call": "fc",
    "function_call_output": "fco",
    "message": "msg",
    "reasoning": "rs",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
