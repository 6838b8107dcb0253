"""The names of agents' sessions."""

from __future__ import annotations

from typing import Any

import pytest

from broker.dialects.sessions import SessionName, name_conversation, name_session

CLAUDE, CODEX = "x-claude-code-session-id", "session-id"


@pytest.mark.parametrize(
    ("main", "sub"),
    [
        ({CLAUDE: "s"}, {CLAUDE: "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "b"}),
        ({CODEX: "s", "thread-id": "s"}, {CODEX: "s", "thread-id": "t"}),
        ({"x-session-id": "s"}, {"x-session-id": "t", "x-parent-session-id": "s"}),
    ],
)
def test_a_subagent_counts_to_the_session_that_started_it(main: Any, sub: Any) -> None:
    session, agent = name_session(main).within("key"), name_session(sub).within("key")
    assert session.session == agent.parent != agent.session
    assert session.parent == ""


def test_names_differ_between_keys_and_reveal_nothing() -> None:
    names = {name_session({CLAUDE: "secret"}).within(owner).session for owner in ("", "a", "b")}
    assert len(names) == 3
    assert not any("secret" in name for name in names)
    assert name_session({"x-claude-code-agent-id": "a", CLAUDE: " "}).within("a") == SessionName()


def test_an_agent_without_a_name_is_known_by_how_its_conversation_begins() -> None:
    begin = [{"role": "system", "content": "You edit files."}, {"role": "user", "content": "Mend it."}]
    call = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "done"}]
    assert name_conversation([]) == name_conversation(begin) == name_conversation(begin[:1] + call) == ""
    name = name_conversation([*begin, *call])
    assert name == name_conversation([*begin, *call, {"role": "user", "content": "Again."}, *call])
    assert name not in ("", name_conversation([begin[0], {"role": "user", "content": "Test it."}, *call]))
