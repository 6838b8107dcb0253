"""HTTP operations and their responses: the table from which the OpenAPI document is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from broker.api.admin import body as admin
from broker.api.batches import body as batch_body
from broker.api.batches.body import EXPIRES_S_MAX, EXPIRES_S_MIN, MessageBatchBody
from broker.api.batches.message_objects import PAGING
from broker.api.batches.objects import BATCHES, FILES
from broker.api.chat import body as chat_body
from broker.api.completions import completions
from broker.api.embeddings import embeddings, rerank
from broker.api.messages import body as messages
from broker.api.responses import body as responses
from broker.api.responses import compaction, conversations
from broker.api.responses.conversations import PAGE_ITEMS_MAX
from broker.api.tokens import tokens

Place = Literal["query", "header"]

ASKING = (400, 401, 404, 408, 413, 429, 500, 503, 504)
"""Error statuses of a request for a model."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path.

    `path`: may contain path parameters, `{name}`. `body`: the type that decodes the request body. `required`:
    required fields of the response document; None: the response has no body. `errors`: statuses.
    `parameters`: place and schema of each, all optional. `is_open`: no API key is needed. `content`: media
    type of the response. `form`: schema of the request body if that is a form.
    """

    method: Literal["get", "post", "delete", "head"]
    path: str
    summary: str
    required: tuple[str, ...] | None
    body: type | None = None
    errors: tuple[int, ...] = (401,)
    parameters: Mapping[str, tuple[Place, dict[str, Any]]] = field(default_factory=dict)
    dialect: Literal["openai", "anthropic"] = "openai"
    is_open: bool = False
    content: str = "application/json"
    form: Mapping[str, Any] | None = None
    status: int = 200

    @property
    def streams(self) -> bool:
        """Whether the body can ask for an event stream."""
        return self.body is not None and hasattr(self.body, "stream")


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_STRING = {"type": "string"}
_VERSION: Mapping[str, tuple[Place, dict[str, Any]]] = {"anthropic-version": ("header", _STRING)}
_ID: Mapping[str, tuple[Place, dict[str, Any]]] = {"stream": ("query", {"enum": ["false"]})}
_PAGE: Mapping[str, tuple[Place, dict[str, Any]]] = {
    "order": ("query", {"enum": ["asc", "desc"]}),
    "after": ("query", _STRING),
    "before": ("query", _STRING),
    "limit": ("query", _integer(1, PAGE_ITEMS_MAX)),
}


def _asked(path: str, summary: str, body: type, *required: str, **more: Any) -> Operation:
    return Operation("post", path, summary, required, body, errors=ASKING, **more)


def _asked_of_anthropic(path: str, summary: str, body: type, *required: str, **more: Any) -> Operation:
    return _asked(path, summary, body, *required, parameters=_VERSION, dialect="anthropic", **more)


def _read(path: str, summary: str, *required: str, **more: Any) -> Operation:
    return Operation("get", path, summary, required, **more)


_CHANGING = (400, 401, 404, 413, 503, 504)
_ONE = "/v1/responses/{id}"
_AFTER: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("query", {"enum": ["true", "false"]}),
    "starting_after": ("query", {"type": "integer", "minimum": 0}),
}
_EVENTS: dict[str, Any] = {"errors": (400, 401, 404), "content": "text/event-stream"}
_BEHIND: dict[str, tuple[Place, dict[str, Any]]] = {"starting_after": ("query", _integer(0, 10**9 - 1))}
_OF_CONVERSATION: dict[str, tuple[Place, dict[str, Any]]] = {"conv_id": ("query", _STRING)}
_FROM: dict[str, tuple[Place, dict[str, Any]]] = {"from": ("query", _integer(0, 10**9 - 1))}
_TALK = "/v1/conversations/{id}"
_PULL = ("id", "object", "model", "status", "done_bytes", "total_bytes")
_CONVERSATION = ("id", "object", "created_at", "metadata")

_FILE = ("id", "object", "bytes", "created_at", "filename", "purpose", "status")
_BATCH = ("id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at")
_MESSAGE_BATCH = ("id", "type", "processing_status", "request_counts", "created_at", "expires_at")
_STORED = (400, 401, 404, 408, 413, 415, 507)
_MANY: Mapping[str, tuple[Place, dict[str, Any]]] = {
    "after": ("query", _STRING),
    "limit": ("query", _integer(1, BATCHES.limit_max)),
}
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _integer(EXPIRES_S_MIN, EXPIRES_S_MAX),
    },
}

_BATCHES = (
    Operation("post", "/v1/files", "Upload a file of requests for a batch", _FILE, errors=_STORED,
              form=_FORM),
    _read("/v1/files", "List the files of batches", "object", "data", "has_more", errors=(400, 401, 404, 507),
          parameters={**_MANY,
              "limit": ("query", _integer(1, FILES.limit_max)),
              "order": ("query", {"enum": ["asc", "desc"]}),
              "purpose": ("query", _STRING),
          }),
    _read("/v1/files/{id}", "Get a file's object", *_FILE, errors=(401, 404, 507)),
    Operation("delete", "/v1/files/{id}", "Delete a file", ("id", "object", "deleted"),
              errors=(400, 401, 404, 507)),
    _read("/v1/files/{id}/content", "Get the content of a file", errors=(401, 404, 507),
          content="application/octet-stream"),
    Operation("post", "/v1/batches", "Create a batch of requests", _BATCH, batch_body.BatchBody,
              errors=_STORED),
    _read("/v1/batches", "List the batches", "object", "data", "has_more", errors=(400, 401, 404, 507),
          parameters=_MANY),
    _read("/v1/batches/{id}", "Get a batch", *_BATCH, errors=(401, 404, 507)),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch", _BATCH, errors=(400, 401, 404, 507)),
)  # fmt: skip
_OF_MESSAGES: dict[str, Any] = {
    "dialect": "anthropic",
    "errors": (400, 401, 404, 507),
    "parameters": _VERSION,
}
_MESSAGE_BATCHES = (
    Operation("post", "/v1/messages/batches", "Create a batch of messages (Anthropic's API)", _MESSAGE_BATCH,
              MessageBatchBody, **_OF_MESSAGES | {"errors": _STORED}),
    _read("/v1/messages/batches", "List the batches of messages", "data", "has_more",
          **_OF_MESSAGES | {"parameters": {**_VERSION,
              "after_id": ("query", _STRING),
              "before_id": ("query", _STRING),
              "limit": ("query", _integer(1, PAGING.limit_max)),
          }}),
    _read("/v1/messages/batches/{id}", "Get a batch of messages", *_MESSAGE_BATCH, **_OF_MESSAGES),
    Operation("delete", "/v1/messages/batches/{id}", "Delete a batch of messages that has ended",
              ("id", "type"), **_OF_MESSAGES),
    Operation("post", "/v1/messages/batches/{id}/cancel", "Cancel a batch of messages", _MESSAGE_BATCH,
              **_OF_MESSAGES),
    _read("/v1/messages/batches/{id}/results", "Get the results of a batch of messages, one in each line",
          content="application/x-jsonl", **_OF_MESSAGES),
)  # fmt: skip

_STREAMS = (
    *(
        _read(f"{path}/{{id}}/stream", "Read on a stream, from the event behind those that were received",
              parameters=_BEHIND, dialect=dialect, **_EVENTS)
        for path, dialect in (
            ("/v1/chat/completions", "openai"), ("/v1/completions", "openai"), ("/v1/messages", "anthropic"),
        )
    ),
    *(
        operation
        for path, parameters in (("/v1/stream/{id}", {}), ("/v1/stream", _OF_CONVERSATION))
        for operation in (
            _read(path, "Read on a conversation's latest stream, from a byte on (llama.cpp's API)",
                  parameters={**parameters, **_FROM}, **_EVENTS),
            Operation("delete", path, "End a conversation's latest stream (llama.cpp's API)", None,
                      parameters=parameters, errors=(400, 401), status=204),
        )
    ),
    Operation("post", "/v1/streams/lookup", "List the latest streams of conversations (llama.cpp's API)", (),
              chat_body.StreamLookup, errors=(400, 401, 413)),
)  # fmt: skip

OPERATIONS = (
    _asked("/v1/chat/completions", "Create a chat completion", chat_body.Body,
           "id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    _asked("/v1/completions", "Create a text completion for each prompt", completions.Body,
           "id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    _asked("/v1/responses", "Create a response", responses.Body,
           "id", "object", "status", "model", "output"),
    _read(_ONE, "Get a stored response, complete or in progress, or the events of one in the background",
          "id", "object", "status", "output", errors=(400, 401, 404, 409), parameters={**_ID, **_AFTER}),
    Operation("delete", _ONE, "Delete a stored response", ("id", "object", "deleted"), errors=(401, 404)),
    _read(f"{_ONE}/input_items", "List the input items of a response", "object", "data", "has_more",
          errors=(400, 401, 404), parameters=_PAGE),
    Operation("post", f"{_ONE}/cancel", "Cancel a response in progress", ("id", "object", "status"),
              errors=(400, 401, 404)),
    _asked("/v1/responses/compact", "Replace a conversation by its user messages and a summary",
           compaction.CompactBody, "id", "object", "output", "usage"),
    Operation("post", "/v1/conversations", "Create a conversation", _CONVERSATION, conversations.CreateBody,
              errors=(400, 401, 413)),
    _read(_TALK, "Get a conversation", *_CONVERSATION, errors=(401, 404)),
    Operation("post", _TALK, "Update the metadata of a conversation", _CONVERSATION, conversations.UpdateBody,
              errors=(400, 401, 404, 413)),
    Operation("delete", _TALK, "Delete a conversation", ("id", "object", "deleted"), errors=(401, 404)),
    _read(f"{_TALK}/items", "List the items of a conversation", "object", "data", "has_more",
          errors=(400, 401, 404), parameters=_PAGE),
    Operation("post", f"{_TALK}/items", "Add items to a conversation", ("object", "data", "has_more"),
              conversations.ItemsBody, errors=(400, 401, 404, 413)),
    _read(f"{_TALK}/items/{{item_id}}", "Get an item of a conversation", "id", "type", errors=(401, 404)),
    Operation("delete", f"{_TALK}/items/{{item_id}}", "Delete an item of a conversation", _CONVERSATION,
              errors=(401, 404)),
    _asked_of_anthropic("/v1/messages", "Create a message (Anthropic's API)", messages.Body,
                        "id", "type", "role", "model", "content", "usage"),
    _asked_of_anthropic("/v1/messages/count_tokens", "Count the tokens of a conversation", messages.Prompt,
                        "input_tokens"),
    *_STREAMS,
    *_MESSAGE_BATCHES,
    *_BATCHES,
    _asked("/tokenize", "Tokenize a text or a conversation (vLLM's API)", tokens.Tokenize,
           "count", "tokens"),
    _asked("/detokenize", "Convert tokens to text (vLLM's API)", tokens.Detokenize, "prompt"),
    _asked("/v1/embeddings", "Create an embedding for each text", embeddings.Body,
           "object", "data", "model", "usage"),
    *(
        _asked(path, "Rank documents by their relevance to a query", rerank.Body, "id", "model", "results")
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    _read("/v1/models", "List all models, in OpenAI's or Anthropic's format", "data", parameters=_VERSION),
    _read("/v1/models/{model}", "Get one model", "id", errors=(401, 404), parameters=_VERSION),
    *(
        Operation("post", f"/v1/models/{verb}", f"{verb.capitalize()} a model that is loaded on demand",
                  ("id", "object", "state"), admin.ModelChoice, errors=errors)
        for verb, errors in (
            ("load", (400, 401, 404, 413, 503)), ("unload", (400, 401, 404, 409, 413)),
            ("pin", (400, 401, 404, 413, 503)), ("unpin", (400, 401, 404, 413)),
        )
    ),
    Operation("post", "/v1/models/pull", "Download a model of the hub", _PULL, admin.ModelChoice,
              errors=(400, 401, 413, 503)),
    _read("/v1/models/pull", "List the downloads", "object", "data"),
    _read("/v1/models/pull/{id}", "Get a download", *_PULL, errors=(401, 404)),
    Operation("post", "/v1/models/pull/{id}/cancel", "Cancel a download", _PULL, errors=(401, 404)),
    _read("/v1/adapters", "List the adapters of all models", "object", "data"),
    Operation("post", "/v1/adapters", "Load an adapter", ("object", "model", "name", "rank"),
              admin.AdapterFolder, errors=_CHANGING),
    Operation("delete", "/v1/adapters/{name}", "Remove an adapter; requests that use it finish",
              ("object", "model", "name", "requests"), errors=(401, 404),
              parameters={"model": ("query", _STRING)}),
    Operation("post", "/v1/load_lora_adapter", "Load an adapter (vLLM's API)", (), admin.LoraFolder,
              errors=_CHANGING, content="text/plain"),
    Operation("post", "/v1/unload_lora_adapter", "Remove an adapter (vLLM's API)", (), admin.LoraName,
              errors=(400, 401, 404, 413), content="text/plain"),
    _read("/v1/status", "Status of the gateway, its workers and their requests, with recent history",
          "object", "time", "gateway", "models", "workers", "requests", "recent",
          parameters={"history": ("query", {"enum": ["true", "false"]})}),
    _read("/v1/status/stream", "The same status every second, as an endless event stream", errors=(401, 503),
          content="text/event-stream"),
    _read("/metrics", "Metrics for Prometheus", content="text/plain"),
    _read("/v1/cache", "Prefix caches, by model", "object", "data"),
    Operation("delete", "/v1/cache", "Clear the prefix caches, or those of one model", ("object", "data"),
              errors=(401, 404, 503, 504), parameters={"model": ("query", _STRING)}),
    Operation("post", "/v1/requests/{id}/cancel", "Cancel a request in flight, one of the same key",
              ("id", "object", "cancelled"), errors=(401, 404)),
    _read("/openapi.json", "This document", "openapi"),
    _read("/v1/inspect", "The last requests as received", "object", "enabled", "data"),
    _read("/v1/inspect/{id}", "One captured request, with the tokens of its prompt", "id", "body", "prompt",
          "answer", errors=(401, 404, 503)),
    _read("/health", "Liveness of the gateway", "status", errors=(), is_open=True),
    _read("/ready", "Readiness: some model is loaded or can be started on request", "status",
          errors=(503,), is_open=True),
    Operation("head", "/", "Check that the server is reachable", None, is_open=True),
)  # fmt: skip
