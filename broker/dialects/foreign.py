"""What another server has put into a conversation, as text: results of its tools, and summaries.

A result of one text is that text; one of several fields is JSON. What no model can read is left out:
ciphertext, signatures, files in base64, and types, which only say how a client displays a result.
"""

from __future__ import annotations

from typing import Any

from broker.dialects.body import encode

_OPAQUE = frozenset(
    {
        "cache_control", "caller", "citations", "encrypted_content", "encrypted_index", "encrypted_stdout",
        "signature", "type",
    }
)  # fmt: skip


SUMMARY = "Summary of the conversation so far:"


def summary_message(summary: str) -> dict[str, Any]:
    """Return the message that stands for an earlier part of the conversation."""
    return {"role": "user", "content": f"{SUMMARY}\n\n{summary}"}


def result_text(result: Any) -> str:
    """Return the text of a result in JSON; empty if it has none."""
    read = _readable(result)
    if isinstance(read, dict) and len(read) == 1:
        [only] = read.values()
        return result_text(only) if isinstance(only, str | list | dict) else encode(read).decode()
    match read:
        case None:
            return ""
        case str():
            return read
        case list():
            return "\n".join(map(result_text, read))
        case _:
            return encode(read).decode()


def _readable(value: Any) -> Any:
    """Return what can be read of a value; None: nothing."""
    match value:
        case str():
            return None if not value or value.startswith("data:") else value
        case list():
            return [part for part in map(_readable, value) if part is not None] or None
        case {"type": "base64"}:
            return None
        case dict():
            read = {name: _readable(field) for name, field in value.items() if name not in _OPAQUE}
            return {name: field for name, field in read.items() if field is not None} or None
        case _:
            return value
