"""Sessions: which requests are turns of one agent, by the names that agents send. Pure.

Agents name their conversations in headers, and some in `prompt_cache_key`. Anthropic's user id in `metadata`
names a user and a session in one text that changes between versions; whoever sends it sends headers too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


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
