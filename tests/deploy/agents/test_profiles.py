"""Launch settings of each agent: they select the endpoint and the model, and nothing else."""

from __future__ import annotations

import json
import subprocess
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.agents.profiles import (
    ANSWER_TOKENS_MAX,
    API_KEY,
    NO_KEY,
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


def opencode(model: Model = MODEL) -> dict[str, object]:
    config: dict[str, object] = json.loads(told(Agent.OPENCODE, model).variables["OPENCODE_CONFIG_CONTENT"])
    return config


def codex(model: Model = MODEL, endpoint: Endpoint = ENDPOINT) -> dict[str, object]:
    """Return the configuration made by Codex's arguments, parsed as Codex does."""
    words = told(Agent.CODEX, model, endpoint).words
    assert set(words[::2]) == {"-c"}
    return tomllib.loads("\n".join(words[1::2]))


def test_opencode_gets_a_provider_of_its_own_for_large_and_small_tasks() -> None:
    assert opencode() == {
        "provider": {
            "roundhouse": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Roundhouse",
                "options": {"baseURL": f"{URL}/v1", "apiKey": "s3cret"},
                "models": {
                    "some/model-4bit": {
                        "name": "some/model-4bit",
                        "limit": {"context": 32768, "output": 8192},
                    }
                },
            }
        },
        "model": "roundhouse/some/model-4bit",
        "small_model": "roundhouse/some/model-4bit",
    }


def test_codex_is_told_by_words_that_win_over_its_file() -> None:
    assert codex() == {
        "model_provider": "roundhouse",
        "model": "some/model-4bit",
        "model_context_window": 32768,
        "model_providers": {
            "roundhouse": {
                "name": "Roundhouse",
                "base_url": f"{URL}/v1",
                "wire_api": "responses",
                "env_key": API_KEY,
            }
        },
    }
    assert told(Agent.CODEX).variables == {API_KEY: "s3cret"}


@given(name=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_whatever_a_model_is_called_codex_reads_it(name: str) -> None:
    assert codex(Model(name))["model"] == name


def test_claude_is_led_to_the_model_for_all_that_it_does() -> None:
    setup = told(Agent.CLAUDE)
    named = {name for name, value in setup.variables.items() if value == MODEL.id}
    assert named == {
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    }
    assert setup.variables["ANTHROPIC_BASE_URL"] == URL
    assert setup.variables["ANTHROPIC_AUTH_TOKEN"] == "s3cret"
    assert setup.variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert setup.variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    flag, settings = setup.words  # they repeat the variables without the key
    assert flag == "--settings"
    rest = {name: value for name, value in setup.variables.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    assert json.loads(settings)["env"] == rest
    # It must not log in as somebody else.
    found = setup.environment({"ANTHROPIC_API_KEY": "x", "CLAUDE_CODE_USE_BEDROCK": "1", "HOME": "/h"})
    assert found["HOME"] == "/h"
    assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} & found.keys()


def test_qwen_is_told_the_kind_of_endpoint_or_its_variables_would_not_count() -> None:
    setup = told(Agent.QWEN)
    assert setup.words == ("--auth-type", "openai", "--model", MODEL.id)
    assert setup.variables == {
        "OPENAI_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "s3cret",
        "OPENAI_MODEL": MODEL.id,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "8192",
    }
    assert Agent.QWEN.setup(Endpoint(URL), MODEL).variables["OPENAI_API_KEY"] == NO_KEY, "it insists on one"


def test_pi_gets_an_extension_that_reads_its_environment() -> None:
    setup = told(Agent.PI)
    assert setup.words == ("--extension", str(PI_EXTENSION), "--provider", "roundhouse", "--model", MODEL.id)
    assert json.loads(setup.variables["ROUNDHOUSE_PI"]) == {
        "baseUrl": f"{URL}/v1",
        "model": MODEL.id,
        "contextWindow": 32768,
        "maxTokens": 8192,
    }
    source = PI_EXTENSION.read_text()
    assert "process.env.ROUNDHOUSE_PI" in source
    assert f'apiKey: "{API_KEY}"' in source
    assert setup.variables[API_KEY] == "s3cret"


@pytest.mark.parametrize("agent", Agent)
def test_no_key_stands_where_everybody_can_read_it(agent: Agent) -> None:
    setup = told(agent)
    assert "s3cret" not in " ".join(setup.words)
    assert "s3cret" in "".join(setup.variables.values())
    assert "s3cret" not in repr(ENDPOINT)


@pytest.mark.parametrize("agent", Agent)
def test_unknown_model_properties_are_omitted(agent: Agent) -> None:
    setup = told(agent, UNMEASURED)
    said = " ".join([*setup.words, *setup.variables.values()])
    assert MODEL.id in said
    assert "None" not in said
    assert "null" not in said


@pytest.mark.parametrize(
    ("context", "answer"), [(1, 1), (4096, 1024), (2**20, ANSWER_TOKENS_MAX), (None, None)]
)
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
