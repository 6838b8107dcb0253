"""Launch settings of each agent: they select the endpoint and the model, and nothing else."""

from __future__ import annotations

import subprocess
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.agents.profiles import (
    PI_EXTENSION,
    Agent,
    AgentProfile,
    Endpoint,
    Model,
    anybody,
    shell_text,
)

URL = "http://127.0.0.1:8000"
ENDPOINT = Endpoint(URL, "s3cret")
MODEL = Model("some/model-4bit", 32768)
UNMEASURED = Model("some/model-4bit")

SHELL_WAIT_S = 20


def told(agent: Agent, model: Model = MODEL, endpoint: Endpoint = ENDPOINT) -> AgentProfile:
    return agent.setup(endpoint, model)


def codex(model: Model = MODEL, endpoint: Endpoint = ENDPOINT) -> dict[str, object]:
    """Return the configuration made by Codex's arguments, parsed as Codex does."""
    words = told(Agent.CODEX, model, endpoint).words
    assert set(words[::2]) == {"-c"}
    return tomllib.loads("\n".join(words[1::2]))


@given(name=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_whatever_a_model_is_called_codex_reads_it(name: str) -> None:
    assert codex(Model(name))["model"] == name


@pytest.mark.parametrize("agent", Agent)
def test_agent_gets_endpoint_model_and_a_key_that_no_other_user_reads(agent: Agent) -> None:
    setup = told(agent)
    said = " ".join([*setup.words, *setup.variables.values()])
    assert URL in said
    assert MODEL.id in said
    assert "32768" in said or "8192" in said, "the context, or the fourth of it that an answer gets"
    assert "s3cret" not in " ".join(setup.words)
    assert "s3cret" in "".join(setup.variables.values())
    assert "s3cret" not in repr(ENDPOINT)
    unknown = told(agent, UNMEASURED)
    said = " ".join([*unknown.words, *unknown.variables.values()])
    assert "None" not in said
    assert "null" not in said


def test_claude_does_not_log_in_as_somebody_else() -> None:
    found = told(Agent.CLAUDE).environment(
        {"ANTHROPIC_API_KEY": "x", "CLAUDE_CODE_USE_BEDROCK": "1", "HOME": "/h"}
    )
    assert found["HOME"] == "/h"
    assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} & found.keys()


def test_extension_of_pi_reads_the_variables_that_it_is_given() -> None:
    source = PI_EXTENSION.read_text()
    assert "process.env.ROUNDHOUSE_PI" in source
    assert 'apiKey: "ROUNDHOUSE_API_KEY"' in source
    assert {"ROUNDHOUSE_PI", "ROUNDHOUSE_API_KEY"} <= told(Agent.PI).variables.keys()


@pytest.mark.parametrize(("context", "answer"), [(1, 1), (4096, 1024), (2**20, 32_000), (None, None)])
def test_a_fourth_of_the_context_is_left_for_an_answer(context: int | None, answer: int | None) -> None:
    assert Model("m", context).answer_tokens == answer


@pytest.mark.parametrize("agent", [None, Agent.CLAUDE, Agent.PI])
def test_printed_shell_script_sets_the_same_environment(agent: Agent | None) -> None:
    name = 'it\'s a "model" $HOME `id`\\'
    setup = (agent.setup if agent else anybody)(ENDPOINT, Model(name))
    script = f"{shell_text(setup, agent)}\nenv -0"
    began = {"ANTHROPIC_API_KEY": "x", "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(
        ["/bin/sh", "-c", script], env=began, capture_output=True, text=True, timeout=SHELL_WAIT_S, check=True
    ).stdout
    found = dict(line.split("=", 1) for line in shown.rstrip("\0").split("\0"))
    wanted = setup.environment(began)
    assert {key: found.get(key) for key in wanted} == wanted
    assert not set(setup.unset) & found.keys()
