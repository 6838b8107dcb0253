"""Launch settings of each agent, for one endpoint and one model. Pure.

They consist of variables and command-line arguments only: no file of the user is overwritten, and none of
ours has to be removed. The user's own settings stay in force, except those of endpoint and model. What
overrides them was tested with each agent, in the version named below.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

NAME = "roundhouse"
"""Name of our endpoint in agents that support several."""

API_KEY = "ROUNDHOUSE_API_KEY"
"""Variable with the key, for agents that read it from a named variable: `ps` would show an argument."""

NO_KEY = "none"
"""Placeholder for endpoints without keys: agents require one."""

ANSWER_SHARE = 4
"""Divisor of the context length: a quarter is reserved for the answer. Agents compact conversations by it."""

ANSWER_TOKENS_MAX = 32_000

PI_EXTENSION = Path(__file__).with_name("pi.js")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint. `url`: without a path, as in http://127.0.0.1:8000."""

    url: str
    key: str = field(default=NO_KEY, repr=False)

    @property
    def openai(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of an endpoint. `context_length`: prompt and answer tokens; None: unknown until loaded."""

    id: str
    context_length: int | None = None
    aliases: tuple[str, ...] = ()
    loaded: bool = True

    @property
    def answer_tokens(self) -> int | None:
        """The number of tokens that an agent reserves for an answer."""
        if self.context_length is None:
            return None
        return max(1, min(ANSWER_TOKENS_MAX, self.context_length // ANSWER_SHARE))


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """Launch settings of an agent. `words`: arguments before the user's. `unset`: variables that would select
    another endpoint."""

    variables: Mapping[str, str]
    words: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the agent's whole environment, based on `environ`."""
        return {name: value for name, value in environ.items() if name not in self.unset} | dict(
            self.variables
        )


class Agent(StrEnum):
    """Supported agents, named by their programs."""

    OPENCODE = "opencode"
    CODEX = "codex"
    CLAUDE = "claude"
    QWEN = "qwen"
    PI = "pi"

    @property
    def package(self) -> str:
        """The npm package."""
        return _PACKAGES[self]

    def setup(self, endpoint: Endpoint, model: Model) -> AgentProfile:
        return _SETUPS[self](endpoint, model)


def anybody(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the variables that the SDKs of OpenAI and Anthropic read, and tools built on them."""
    openai = {"OPENAI_BASE_URL": endpoint.openai, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": model.id}
    anthropic = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "ANTHROPIC_MODEL": model.id,
    }
    return AgentProfile(openai | anthropic)


def shell_text(setup: AgentProfile, agent: Agent | None = None) -> str:
    """Return a profile as shell commands, with the agent's command line as a comment."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    lines += [f"unset {name}" for name in setup.unset]
    if agent is not None and setup.words:
        lines.append(f"# {shlex.join([agent, *setup.words])}")
    return "\n".join(lines)


# --- the agents ---------------------------------------------------------------------------------------


def _opencode(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the profile for opencode 1.18. Its variable overrides the user's and the project's files."""
    served: dict[str, object] = {"name": model.id}
    if model.context_length is not None:
        served["limit"] = {"context": model.context_length, "output": model.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Roundhouse",
        "options": {"baseURL": endpoint.openai, "apiKey": endpoint.key},
        "models": {model.id: served},
    }
    named = f"{NAME}/{model.id}"
    config = {"provider": {NAME: provider}, "model": named, "small_model": named}
    return AgentProfile({"OPENCODE_CONFIG_CONTENT": _json(config)})


def _codex(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the profile for codex 0.171. `-c` overrides `config.toml`; its values are TOML, in which JSON
    strings and numbers are valid."""
    ours = f"model_providers.{NAME}"
    wanted: dict[str, object] = {
        "model_provider": NAME,
        "model": model.id,
        f"{ours}.name": "Roundhouse",
        f"{ours}.base_url": endpoint.openai,
        f"{ours}.wire_api": "responses",
        f"{ours}.env_key": API_KEY,
    }
    if model.context_length is not None:
        wanted["model_context_window"] = model.context_length
    words = (word for name, value in wanted.items() for word in ("-c", f"{name}={_json(value)}"))
    return AgentProfile({API_KEY: endpoint.key}, tuple(words))


def _claude(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the profile for claude 2.1. `env` in the user's settings overrides the environment, and
    `--settings` overrides both; the key is only in the environment."""
    models = ("", "SMALL_FAST_", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_")
    public = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        **{f"ANTHROPIC_{kind}MODEL": model.id for kind in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": model.id,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Disables a first line of the prompt that differs in each conversation.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    if model.context_length is not None:
        # It assumes a million tokens for unknown models.
        public["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(model.context_length)
        public["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(model.answer_tokens)
    elsewhere = (
        "ANTHROPIC_API_KEY",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_FOUNDRY",
        "CLAUDE_CODE_USE_VERTEX",
    )
    words = ("--settings", _json({"env": public}))
    return AgentProfile({**public, "ANTHROPIC_AUTH_TOKEN": endpoint.key}, words, elsewhere)


def _qwen(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the profile for qwen 0.24. With `--auth-type`, the variables override the user's settings."""
    told = {"OPENAI_BASE_URL": endpoint.openai, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": model.id}
    if model.answer_tokens is not None:
        told["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(model.answer_tokens)
    return AgentProfile(told, ("--auth-type", "openai", "--model", model.id))


def _pi(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the profile for pi 1.6. It reads endpoints from `models.json` in its only folder, or from an
    extension: ours registers the endpoint that the environment names."""
    served = {"baseUrl": endpoint.openai, "model": model.id}
    limits = {"contextWindow": model.context_length, "maxTokens": model.answer_tokens}
    served_here = served | {name: limit for name, limit in limits.items() if limit is not None}
    words = ("--extension", str(PI_EXTENSION), "--provider", NAME, "--model", model.id)
    return AgentProfile({"ROUNDHOUSE_PI": _json(served_here), API_KEY: endpoint.key}, words)


def _json(value: object) -> str:
    # Not escaped, because TOML does not allow JSON's surrogate pairs.
    return json.dumps(value, ensure_ascii=False)


_PACKAGES = {
    Agent.OPENCODE: "opencode-ai",
    Agent.CODEX: "@openai/codex",
    Agent.CLAUDE: "@anthropic-ai/claude-code",
    Agent.QWEN: "@qwen-code/qwen-code",
    Agent.PI: "@earendil-works/pi-coding-agent",
}
_SETUPS: Mapping[Agent, Callable[[Endpoint, Model], AgentProfile]] = {
    Agent.OPENCODE: _opencode,
    Agent.CODEX: _codex,
    Agent.CLAUDE: _claude,
    Agent.QWEN: _qwen,
    Agent.PI: _pi,
}
