"""Context-overflow errors match the patterns by which agents recognize them and then send less."""

from __future__ import annotations

import re

import pytest

from protocol.errors import Code, too_long

# Patterns from the agents' sources: opencode 1.18 and pi 0.74, qwen-code 0.24, Claude Code 2.1.
MESSAGES = {
    "opencode, pi": r"maximum context length is \d+ tokens",
    "pi": r"reduce the length of the messages",
    "qwen-code": r"maximum context length is\s*(\d[\d,]*)\s*tokens?[\s\S]*?(?:resulted in|requested|used)"
    r"\s*(\d[\d,]*)\s*tokens?",
    "Claude Code": r"maximum context length",
}


@pytest.mark.parametrize("pattern", MESSAGES.values(), ids=MESSAGES)
def test_agents_know_it_by_its_message(pattern: str) -> None:
    for by_memory in (False, True):
        message = too_long(8192, 9000, "messages", by_memory=by_memory).message
        found = re.search(pattern, message, re.IGNORECASE)
        assert found is not None
        assert found.groups() in ((), ("8192", "9000"))


def test_codex_and_opencode_know_it_by_its_code() -> None:
    assert too_long(8192, 9000, "messages", by_memory=False).code is Code.CONTEXT_LENGTH_EXCEEDED
    assert Code.CONTEXT_LENGTH_EXCEEDED == "context_length_exceeded"
