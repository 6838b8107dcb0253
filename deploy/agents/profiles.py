"""Launch settings of each agent, for one endpoint and one model. Pure.

They consist of variables and command-line arguments only: no file of the user is overwritten, and none of
ours has to be removed. The user's own settings stay in force, except those of endpoint and model. What
overrides them was tested with each agent, in the version named in `protocol/common/client_recipes.toml`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

NO_KEY = "none"
"""Placeholder for endpoints without keys: agents require one."""

PI_EXTENSION = Path(__file__).with_name("pi.js")


def _recipes() -> Mapping[str, Any]:
    # Imported when it is called: the command first checks that `protocol` is ours.
    from protocol.common.client_recipes import client_recipes

    return client_recipes()


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
        recipes = _recipes()
        most, share = int(recipes["answer_tokens_max"]), int(recipes["answer_share"])
        return max(1, min(most, self.context_length // share))


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
        return str(_recipes()["agents"][self]["package"])

    def setup(self, endpoint: Endpoint, model: Model) -> AgentProfile:
        return _profile(_recipes()["agents"][self], endpoint, model)


def anybody(endpoint: Endpoint, model: Model) -> AgentProfile:
    """Return the variables that the SDKs of OpenAI and Anthropic read, and tools built on them."""
    return _profile(_recipes()["sdks"], endpoint, model)


def shell_text(setup: AgentProfile, agent: Agent | None = None) -> str:
    """Return a profile as shell commands, with the agent's command line as a comment."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    lines += [f"unset {name}" for name in setup.unset]
    if agent is not None and setup.words:
        lines.append(f"# {shlex.join([agent, *setup.words])}")
    return "\n".join(lines)


# --- recipes filled in --------------------------------------------------------------------------------

_PLACEHOLDER = re.compile(r"\{\{(\w+)(\|json)?\}\}")


def _profile(recipe: Mapping[str, Any], endpoint: Endpoint, model: Model) -> AgentProfile:
    facts: dict[str, Any] = {
        "origin": endpoint.url,
        "openai": endpoint.openai,
        "key": endpoint.key,
        "model": model.id,
        "context": model.context_length,
        "answer": model.answer_tokens,
        "extension": str(PI_EXTENSION),
    }
    variables = {name: _text(value) for name, value in _filled(recipe["variables"], facts).items()}
    keyless = (name for name, value in recipe["variables"].items() if value != "{{key}}")
    facts["public"] = {name: variables[name] for name in keyless if name in variables}
    groups = [_filled(group, facts) for group in (*recipe.get("words", ()), *recipe.get("launch_words", ()))]
    words = tuple(_text(word) for group in groups if None not in group for word in group)
    return AgentProfile(variables, words, tuple(recipe.get("unset", ())))


def _filled(value: Any, facts: Mapping[str, Any]) -> Any:
    """Return a value with facts in place of its placeholders; None if one is unknown. Tables leave such
    entries out, and are None themselves if nothing is left."""
    if isinstance(value, list):
        return [_filled(item, facts) for item in value]
    if isinstance(value, dict):
        entries = {_filled(name, facts): _filled(item, facts) for name, item in value.items()}
        return {name: item for name, item in entries.items() if item is not None} or None
    placeholders = list(_PLACEHOLDER.finditer(value))
    if any(facts[each[1]] is None for each in placeholders):
        return None
    if placeholders and placeholders[0][0] == value and not placeholders[0][2]:
        return facts[placeholders[0][1]]
    return _PLACEHOLDER.sub(lambda each: _json(facts[each[1]]) if each[2] else str(facts[each[1]]), value)


def _text(value: Any) -> str:
    return _json(value) if isinstance(value, dict) else str(value)


def _json(value: object) -> str:
    # Not escaped, because TOML does not allow JSON's surrogate pairs.
    return json.dumps(value, ensure_ascii=False)
