"""Texts and images as the three dialects write them, and questions asked with the dialects' own clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.images import data_url

DIALECTS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def body_of(dialect: str, content: Any, **fields: Any) -> dict[str, Any]:
    """Return the body of a request with one message of the user."""
    said = [{"role": "user", "content": content}]
    if dialect == "responses":
        return {"input": said, **fields}
    limit = {"max_tokens": 4096} if dialect == "messages" else {}
    return {"messages": said, **limit, **fields}


def linked_image(dialect: str, url: str) -> dict[str, Any]:
    match dialect:
        case "chat":
            return {"type": "image_url", "image_url": {"url": url}}
        case "responses":
            return {"type": "input_image", "image_url": url}
    return {"type": "image", "source": {"type": "url", "url": url}}


def image(dialect: str, data: bytes) -> dict[str, Any]:
    """Return the part of a message with a PNG, or with an image that is declared as one."""
    if dialect != "messages":
        return linked_image(dialect, data_url(data))
    encoded = data_url(data).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def text(dialect: str, words: str) -> dict[str, Any]:
    return {"type": "input_text" if dialect == "responses" else "text", "text": words}


def parts(dialect: str, content: Sequence[str | bytes]) -> list[dict[str, Any]]:
    """Return the parts of a message with these texts and images."""
    return [text(dialect, each) if isinstance(each, str) else image(dialect, each) for each in content]


def tool(dialect: str, name: str, *parameters: str) -> dict[str, Any]:
    """Return a strict tool whose parameters are strings."""
    properties = {each: {"type": "string"} for each in parameters}
    closed = {"required": list(parameters), "additionalProperties": False}
    schema = {"type": "object", "properties": properties, **closed}
    if dialect == "messages":
        return {"name": name, "input_schema": schema}
    function = {"name": name, "strict": True, "parameters": schema}
    return {"type": "function", **({"function": function} if dialect == "chat" else function)}


def ask(client: Any, dialect: str, model: str, *content: str | bytes, stream: bool = False) -> str:
    """Ask with the dialect's client, and return the text of the answer, which is streamed or whole."""
    body = body_of(dialect, parts(dialect, content), model=model)
    match dialect, stream:
        case "chat", False:
            return str(client.chat.completions.create(**body).choices[0].message.content)
        case "chat", True:
            chunks = client.chat.completions.create(**body, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        case "responses", False:
            return str(client.responses.create(**body).output_text)
        case "responses", True:
            with client.responses.stream(**body) as events:
                return str(events.get_final_response().output_text)
        case "messages", False:
            return "".join(each.text for each in client.messages.create(**body).content)
    with client.messages.stream(**body) as events:
        return "".join(events.text_stream)
