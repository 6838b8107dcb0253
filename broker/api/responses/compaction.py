"""Compaction: a conversation replaced by its user messages and a summary that the model writes.

It is a request of its own, or a response whose `input` ends with a `compaction_trigger`.
"""

from __future__ import annotations

import dataclasses

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker.api.responses.answer import Document, ResponseBuilder, ResponseDocumentRenderer
from broker.api.responses.body import Body, RawItem
from broker.api.responses.history import ConversationHistory
from broker.api.responses.items import TRIGGER, Placed, kind_of, listed
from broker.dialects.body import decode, encode, wrong

REQUEST = (
    "Summarize this conversation for a reader who continues it without seeing it. Keep the goal, decisions, "
    "facts, names, paths, numbers, results of tools, and what is still to be done. Write the summary only."
)


class CompactBody(Struct):
    """Body of a compaction. Other fields are ignored."""

    model: str | None = None
    input: str | list[RawItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(CompactBody)


def read(raw: bytes) -> Body:
    """Decode and check a body; return that of the response that writes the summary. Raises `RequestError`
    naming the parameter at fault."""
    asked = decode(_decoder, raw)
    if asked.input is None and not asked.previous_response_id:
        raise wrong("input", "is required without 'previous_response_id'")
    return Body(
        model=asked.model,
        input=asked.input or [],
        instructions=asked.instructions,
        previous_response_id=asked.previous_response_id,
        store=False,
    )


def is_triggered(history: ConversationHistory) -> bool:
    """Return whether the input of a response ends with a compaction trigger."""
    return bool(history.items) and kind_of(history.items[-1]) == TRIGGER


def untriggered(history: ConversationHistory) -> ConversationHistory:
    """Return the history without the trigger at its end."""
    return dataclasses.replace(history, items=history.items[:-1])


def summarizing(body: Body) -> Body:
    """Return the body of the response that writes the summary: without tools, as free text."""
    return replace(body, tools=None, tool_choice=None, text=None)


def placed(history: ConversationHistory) -> list[Placed]:
    """Return the conversation followed by the request for a summary."""
    return [*history.placed(), ("input", {"role": "user", "content": REQUEST})]


class CompactionRenderer(ResponseDocumentRenderer):
    """Renders the summary as a compaction document: all user messages, then one compaction item."""

    def __init__(self, answer: ResponseBuilder, history: ConversationHistory, stem: str) -> None:
        super().__init__(answer)
        self._history = history
        self._stem = stem

    def document(self) -> bytes:
        assert self._answer.document is not None
        return encode(compacted(self._answer.document, self._history, self._stem))


def compacted(summary: Document, history: ConversationHistory, stem: str) -> Document:
    """Return the compaction document. `summary`: the response whose output is the compaction item."""
    items = [item for _, item in history.placed()]
    asked = [item for item in items if kind_of(item) == "message" and item.get("role") == "user"]
    return {
        "id": summary["id"],
        "object": "response.compaction",
        "created_at": summary["created_at"],
        "output": [*listed(asked, stem), *summary["output"]],
        "usage": summary["usage"],
    }
