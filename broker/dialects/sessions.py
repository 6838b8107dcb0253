"""Sessions: which requests are turns of one agent, by the names that agents send. Pure.

Agents name their conversations in headers, and some in `prompt_cache_key`. Those of others are known by their
beginning, once a tool has returned: who only asks once is no session that memory is kept for. Anthropic's
user id in `metadata` names a user and a session in one text that changes between versions; whoever sends it
sends headers too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from protocol.conversation import pack


class SessionHeaders(NamedTuple):
    """Headers of one kind of agent: the session's; that of a sub-agent within it, whose value is another than
    the session's; that of the session that it was started from."""

    session: str
    agent: str = ""
    parent: str = ""


HEADERS = (
    SessionHeaders("x-claude-code-session-id", agent="x-claude-code-agent-id"),
    SessionHeaders("session-id", agent="thread-id"),  # Codex
    SessionHeaders("x-session-id", parent="x-parent-session-id"),  # opencode
    SessionHeaders("session_id"),  # Codex, earlier versions
)
_NAME_BYTES = 12


@dataclass(frozen=True, slots=True)
class SessionName:
    """The session of a request, and the one that a sub-agent counts to; empty for none."""

    session: str = ""
    parent: str = ""

    def within(self, owner: str) -> SessionName:
        """Return opaque names that differ between owners of API keys."""
        return SessionName(_opaque(owner, self.session), _opaque(owner, self.parent))


NO_SESSION = SessionName()


def name_conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a name for the conversation of an agent that sends none: by its messages up to the first of the
    user, which each turn repeats. Empty before a tool has returned. `messages`: canonical."""
    roles = [message["role"] for message in messages]
    if "tool" not in roles or "user" not in roles:
        return ""
    return hashlib.blake2b(pack(messages[: roles.index("user") + 1]), digest_size=_NAME_BYTES).hexdigest()


def name_session(headers: Mapping[str, str]) -> SessionName:
    """Return the session that headers name, of the first kind of agent that sends any."""
    for kind in HEADERS:
        if session := headers.get(kind.session, "").strip():
            agent, parent = (headers.get(name, "").strip() for name in (kind.agent, kind.parent))
            if agent and agent != session:
                return SessionName(f"{session}\0{agent}", session)
            return SessionName(session, parent if parent != session else "")
    return NO_SESSION


def _opaque(owner: str, name: str) -> str:
    text = f"{owner}\0{name}".encode(errors="replace")
    return hashlib.blake2b(text, digest_size=_NAME_BYTES).hexdigest() if name else ""
