"""What each agent is told, so that it works with one endpoint and one model. Pure.

All of it is variables and words of a command line: nothing is written, so there is no file of the user's that
could be overwritten, and none of ours to be removed. The user's own settings count on, but for those that
would lead to another endpoint or model; what wins over them was found with each agent, as named below.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

NAME = "roundhouse"
"""What our endpoint is called in an agent that knows several."""

API_KEY = "ROUNDHOUSE_API_KEY"
"""The variable by which an agent is told the key, where it asks for the name of one: `ps` shows words."""

NO_KEY = "none"
"""Agents insist on a key where the endpoint needs none."""

ANSWER_SHARE = 4
"""A fourth of the context is left for an answer: agents that count make their conversations shorter then."""

ANSWER_TOKENS_MAX = 32_000

PI_EXTENSION = Path(__file__).with_name("pi.js")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url`: without a path, as in http://127.0.0.1:8000."""

    url: str
    key: str = field(default=NO_KEY, repr=False)

    @property
    def openai(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Model:
    """`context_length`: in tokens, prompt and answer together; None: it is not known before it is loaded."""

    id: str
    context_length: int | None = None
    aliases: tuple[str, ...] = ()
    loaded: bool = True

    @property
    def answer_tokens(self) -> int | None:
        """What an agent may leave for an answer."""
        if self.context_length is None:
            return None
        return max(1, min(ANSWER_TOKENS_MAX, self.context_length // ANSWER_SHARE))


@dataclass(frozen=True, slots=True)
class Setup:
    """`words` stand before those of the user; `unset`: variables that would lead elsewhere."""

    variables: Mapping[str, str]
    words: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The whole of an agent's, started from `environ`."""
        return {name: value for name, value in environ.items() if name not in self.unset} | dict(
            self.variables
        )


class Agent(StrEnum):
    """The agents that can be started, named by their programs."""

    OPENCODE = "opencode"
    CODEX = "codex"
    CLAUDE = "claude"
    QWEN = "qwen"
    PI = "pi"

    @property
    def package(self) -> str:
        """What npm installs it by."""
        return _PACKAGES[self]

    def setup(self, endpoint: Endpoint, model: Model) -> Setup:
        return _SETUPS[self](endpoint, model)


def anybody(endpoint: Endpoint, model: Model) -> Setup:
    """For any client: the variables that the SDKs of OpenAI and Anthropic read, and tools built on them."""
    openai = {"OPENAI_BASE_URL": endpoint.openai, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": model.id}
    anthropic = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "ANTHROPIC_MODEL": model.id,
    }
    return Setup(openai | anthropic)


def shell_text(setup: Setup, agent: Agent | None = None) -> str:
    """A setup in the language of the shell, to be evaluated; how the agent is started then, as a comment."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    lines += [f"unset {name}" for name in setup.unset]
    if agent is not None and setup.words:
        lines.append(f"# {shlex.join([agent, *setup.words])}")
    return "\n".join(lines)


# --- the agents ---------------------------------------------------------------------------------------


def _opencode(endpoint: Endpoint, model: Model) -> Setup:
    """1.18. The content of this variable is laid over the user's and the project's files."""
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
    return Setup({"OPENCODE_CONFIG_CONTENT": _json(config)})


def _codex(endpoint: Endpoint, model: Model) -> Setup:
    """0.169. `-c` wins over `config.toml`; values are TOML, whose strings and numbers JSON's are."""
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
    return Setup({API_KEY: endpoint.key}, tuple(words))


def _claude(endpoint: Endpoint, model: Model) -> Setup:
    """2.1. `env` in the user's settings wins over the environment, and `--settings` over both; the key is in
    the environment alone."""
    models = ("", "SMALL_FAST_", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_")
    public = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        **{f"ANTHROPIC_{kind}MODEL": model.id for kind in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": model.id,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # A line at the head of the prompt that is another one in each conversation.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    if model.context_length is not None:
        # For a model that it does not know it takes a million for granted.
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
    return Setup({**public, "ANTHROPIC_AUTH_TOKEN": endpoint.key}, words, elsewhere)


def _qwen(endpoint: Endpoint, model: Model) -> Setup:
    """0.24. The variables win over the user's settings once the kind of endpoint is said."""
    told = {"OPENAI_BASE_URL": endpoint.openai, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": model.id}
    if model.answer_tokens is not None:
        told["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(model.answer_tokens)
    return Setup(told, ("--auth-type", "openai", "--model", model.id))


def _pi(endpoint: Endpoint, model: Model) -> Setup:
    """0.74. Endpoints come from `models.json` in its one folder, with all else that it keeps, or from an
    extension: ours reads what it is to register from the environment."""
    served = {"baseUrl": endpoint.openai, "model": model.id}
    limits = {"contextWindow": model.context_length, "maxTokens": model.answer_tokens}
    served_here = served | {name: limit for name, limit in limits.items() if limit is not None}
    words = ("--extension", str(PI_EXTENSION), "--provider", NAME, "--model", model.id)
    return Setup({"ROUNDHOUSE_PI": _json(served_here), API_KEY: endpoint.key}, words)


def _json(value: object) -> str:
    # As TOML reads it, too: there an escape is a whole character, never half a pair.
    return json.dumps(value, ensure_ascii=False)


_PACKAGES = {
    Agent.OPENCODE: "opencode-ai",
    Agent.CODEX: "@openai/codex",
    Agent.CLAUDE: "@anthropic-ai/claude-code",
    Agent.QWEN: "@qwen-code/qwen-code",
    Agent.PI: "@earendil-works/pi-coding-agent",
}
_SETUPS: Mapping[Agent, Callable[[Endpoint, Model], Setup]] = {
    Agent.OPENCODE: _opencode,
    Agent.CODEX: _codex,
    Agent.CLAUDE: _claude,
    Agent.QWEN: _qwen,
    Agent.PI: _pi,
}
