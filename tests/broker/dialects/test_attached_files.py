"""Files as parts of a message, read alike in every dialect."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.messages import body as messages
from broker.api.messages.conversation import conversation
from broker.api.responses import body as responses
from broker.api.responses import request
from protocol.errors import Code, RequestError

WORDS = "Grüße\n"


def encoded(data: str | bytes, media_type: str = "text/plain", *, url: bool = True) -> str:
    text = base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
    return f"data:{media_type};base64,{text}" if url else text


def in_chat(file: dict[str, Any]) -> str:
    said = [{"role": "tool", "tool_call_id": "c", "content": [{"type": "file", "file": file}]}]
    body = chat_body.read(json.dumps({"messages": said}).encode())
    return str(chat.conversation(body, system_in_place=True).messages[0]["content"])


def in_responses(file: dict[str, Any]) -> str:
    item = {"role": "user", "content": [{"type": "input_file", **file}]}
    body = responses.read(b'{"input":"a"}')
    return str(request.conversation(body, [("input[0]", item)], system_in_place=True).messages[0]["content"])


def in_messages(file: dict[str, Any]) -> str:
    media_type, _, data = file["file_data"].removeprefix("data:").rpartition(";base64,")
    source = {"type": "base64", "media_type": media_type or None, "data": data}
    block = {"type": "document", "title": file.get("filename"), "source": source}
    said = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
    body = messages.read(json.dumps(said).encode())
    return str(conversation(body, system_in_place=True).messages[0]["content"])


DIALECTS = pytest.mark.parametrize("read", [in_chat, in_responses, in_messages])


@DIALECTS
@pytest.mark.parametrize(
    "data",
    [
        encoded(WORDS), encoded(WORDS, url=False), encoded(WORDS, "application/json"),
        encoded(WORDS, "video/mp2t"), encoded(WORDS, ""),
        encoded(WORDS.encode("utf-8-sig"), "text/csv"), encoded(WORDS.encode("utf-16")),
        encoded(WORDS.encode("latin-1"), "text/plain;charset=ISO-8859-1"),
        encoded(WORDS, "text/markdown; charset=utf-8"),
    ],
)  # fmt: skip
def test_text_is_read_with_its_name(read: Any, data: str) -> None:
    assert read({"filename": "a.txt", "file_data": data}) == f"a.txt\n{WORDS}"
    assert read({"file_data": data}) == WORDS


@DIALECTS
@pytest.mark.parametrize(
    ("data", "code", "why"),
    [
        (encoded(b"%PDF-1.7\n", "application/pdf"), Code.UNSUPPORTED_MEDIA, "is a PDF, which cannot be read"),
        (encoded(b"%PDF-1.7\n", url=False), Code.UNSUPPORTED_MEDIA, "send its text, or its pages as images"),
        (encoded("a", "application/pdf"), Code.UNSUPPORTED_MEDIA, "of type 'application/pdf'"),
        (encoded(b"PK\3\4\0", "application/zip"), Code.UNSUPPORTED_MEDIA, "of type 'application/zip'"),
        (encoded("a", "image/svg+xml"), Code.UNSUPPORTED_MEDIA, "of type 'image/svg"),
        (encoded(WORDS.encode("latin-1")), Code.UNSUPPORTED_MEDIA, "not text in UTF-8"),
        (encoded("a", "text/plain;charset=utf-99"), Code.UNSUPPORTED_MEDIA, "not text in UTF-8"),
        ("data:text/plain;base64,?", Code.INVALID_MEDIA, "invalid base64"),
    ],
)
def test_what_is_no_text_is_refused_with_what_is_possible(read: Any, data: str, code: Code, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        read({"filename": "a", "file_data": data})
    assert refused.value.code is code
    assert str(refused.value.param).startswith(("messages[0].content[0]", "input[0].content[0]"))


@pytest.mark.parametrize("read", [in_chat, in_responses])
@pytest.mark.parametrize("file", [{"file_id": "file-1"}, {"file_url": "https://a.example/a.txt"}, {}])
def test_a_file_that_is_elsewhere_is_refused(read: Any, file: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="'file_data' is required") as refused:
        read(file)
    assert refused.value.code is Code.UNSUPPORTED_MEDIA
