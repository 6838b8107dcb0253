"""What can be asked over HTTP, and how each is answered: the table that the OpenAPI document is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from broker.dialects import chat_body, completions, embeddings, rerank, tokens
from broker.dialects.bounds import between
from broker.dialects.messages import body as messages
from broker.dialects.responses import body as responses
from broker.dialects.responses.listing import PAGE_ITEMS_MAX

Place = Literal["query", "header"]

ASKING = (400, 401, 404, 408, 413, 429, 500, 503, 504)
"""How a request for a model can be refused."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`path`: with `{name}` where anything may stand. `body`: the type that decodes it. `told`: of the
    document that answers it, what is always there; None: the answer has no body. `errors`: statuses.
    `parameters`: where each stands, and its schema; none is required. `is_open`: it needs no key. `content`:
    the type of an answer that is no such document."""

    method: Literal["get", "post", "delete", "head"]
    path: str
    summary: str
    told: tuple[str, ...] | None
    body: type | None = None
    streams: bool = False
    errors: tuple[int, ...] = (401,)
    parameters: Mapping[str, tuple[Place, dict[str, Any]]] = field(default_factory=dict)
    dialect: Literal["openai", "anthropic"] = "openai"
    is_open: bool = False
    content: str = "application/json"


_STRING = {"type": "string"}
_VERSION: Mapping[str, tuple[Place, dict[str, Any]]] = {"anthropic-version": ("header", _STRING)}
_ID: Mapping[str, tuple[Place, dict[str, Any]]] = {"stream": ("query", {"enum": ["false"]})}
_PAGE: Mapping[str, tuple[Place, dict[str, Any]]] = {
    "order": ("query", {"enum": ["asc", "desc"]}),
    "after": ("query", _STRING),
    "before": ("query", _STRING),
    "limit": ("query", {"type": "integer", **between(1, PAGE_ITEMS_MAX)}),
}


def _asked(path: str, summary: str, body: type, *told: str, **more: Any) -> Operation:
    return Operation("post", path, summary, told, body, errors=ASKING, **more)


def _asked_of_anthropic(path: str, summary: str, body: type, *told: str, **more: Any) -> Operation:
    return _asked(path, summary, body, *told, parameters=_VERSION, dialect="anthropic", **more)


def _read(path: str, summary: str, *told: str, **more: Any) -> Operation:
    return Operation("get", path, summary, told, **more)


_ONE = "/v1/responses/{id}"

OPERATIONS = (
    _asked("/v1/chat/completions", "A conversation's next message", chat_body.Body,
           "id", "object", "created", "model", "choices", "usage", streams=True),
    _asked("/v1/completions", "What follows each prompt", completions.Body,
           "id", "object", "created", "model", "choices", "usage", streams=True),
    _asked("/v1/responses", "The answer to a conversation's items", responses.Body,
           "id", "object", "status", "model", "output", streams=True),
    _read(_ONE, "A response that is kept, or as far as it is", "id", "object", "status", "output",
          errors=(400, 401, 404), parameters=_ID),
    Operation("delete", _ONE, "Forget a response", ("id", "object", "deleted"), errors=(401, 404)),
    _read(f"{_ONE}/input_items", "What a response answers, page by page", "object", "data", "has_more",
          errors=(400, 401, 404), parameters=_PAGE),
    Operation("post", f"{_ONE}/cancel", "End a response that runs", ("id", "object", "status"),
              errors=(400, 401, 404)),
    _asked_of_anthropic("/v1/messages", "A conversation's next message, as Anthropic has it", messages.Body,
                        "id", "type", "role", "model", "content", "usage", streams=True),
    _asked_of_anthropic("/v1/messages/count_tokens", "How many tokens a conversation has", messages.Prompt,
                        "input_tokens"),
    _asked("/tokenize", "The tokens of a text or of a conversation, as vLLM tells them", tokens.Tokenize,
           "count", "tokens"),
    _asked("/detokenize", "The text of tokens", tokens.Detokenize, "prompt"),
    _asked("/v1/embeddings", "A vector for each text", embeddings.Body, "object", "data", "model", "usage"),
    *(
        _asked(path, "Documents by how relevant they are for a query", rerank.Body, "id", "model", "results")
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    _read("/v1/models", "All models, as OpenAI or as Anthropic shows them", "data", parameters=_VERSION),
    _read("/v1/models/{model}", "One model", "id", errors=(401, 404), parameters=_VERSION),
    _read("/v1/status", "The gateway, its workers, where each of their requests stands, and the last minutes",
          "object", "time", "gateway", "models", "workers", "requests", "recent",
          parameters={"history": ("query", {"enum": ["true", "false"]})}),
    _read("/v1/status/stream", "The same, again every second, as events; without end", errors=(401, 503),
          content="text/event-stream"),
    _read("/metrics", "Counters for Prometheus", content="text/plain"),
    _read("/v1/cache", "The prefix caches, by model", "object", "data"),
    Operation("delete", "/v1/cache", "Empty the prefix caches, or one model's", ("object", "data"),
              errors=(401, 404, 503, 504), parameters={"model": ("query", _STRING)}),
    _read("/openapi.json", "This document", "openapi"),
    _read("/v1/inspect", "The last requests as they came", "object", "enabled", "data"),
    _read("/v1/inspect/{id}", "One of them, with the tokens of its prompt", "id", "body", "prompt", "answer",
          errors=(401, 404, 503)),
    _read("/health", "The gateway lives", "status", errors=(), is_open=True),
    _read("/ready", "Some model serves, or is started when asked for", "status", errors=(503,), is_open=True),
    Operation("head", "/", "Somebody is there", None, is_open=True),
)  # fmt: skip
