"""`recipes.js`: the snippets of *Connect* are those of docs/clients.md and of `roundhouse launch`."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest

from deploy.agents.profiles import Agent, AgentProfile, Endpoint, Model
from protocol.common.client_recipes import client_recipes
from tests.blocks import ADDRESS, ROOT, blocks
from tests.broker.page.scripts import Call

ORIGIN = f"http://{ADDRESS}"
DOCUMENTED = ("curl", "Python", "JavaScript", "Anthropic SDK", "Open WebUI")
AGENTS = {"Claude Code": Agent.CLAUDE, "Codex": Agent.CODEX, "opencode": Agent.OPENCODE}
MODELS = (Model("pocket"), Model('org/a model\'s "name"', 8192), Model("large", 262_144))


def snippets(call: Call, key: str = "", **model: Any) -> dict[str, str]:
    """Return the snippets by the names of the clients."""
    server = {"origin": ORIGIN, "key": key, "model": {"id": "pocket"} | model}
    return {made["name"]: made["text"] for made in call("recipes.js", "recipes", client_recipes(), server)}


def test_the_snippets_are_in_the_document_whose_recipes_are_run(call: Call) -> None:
    documented = [block.text.strip() for block in blocks(ROOT / "docs" / "clients.md")]
    assert {snippets(call)[name] for name in DOCUMENTED} <= {*documented}


def _words(text: str) -> list[str]:
    """Split a shell command, which may continue on the next line."""
    return shlex.split(text.replace("\\\n", ""))


def profile_of(snippet: str) -> AgentProfile:
    """Parse a snippet as a shell would: exports, `unset`, and the agent with its arguments."""
    variables: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    words = _words(snippet)
    while words[0] == "export":
        name, _, value = words[1].partition("=")
        variables[name] = value
        words = words[2:]
    if words[0] == "unset":
        end = words.index("claude")
        unset, words = tuple(words[1:end]), words[end:]
    return AgentProfile(variables, tuple(words), unset)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
@pytest.mark.parametrize("name", AGENTS)
def test_the_snippet_of_an_agent_is_what_launch_sets(call: Call, name: str, model: Model) -> None:
    key = "none" if model.context_length is None else "sesame"
    limit = {} if model.context_length is None else {"context_length": model.context_length}
    found = profile_of(snippets(call, key=key, id=model.id, **limit)[name])
    wanted = AGENTS[name].setup(Endpoint(ORIGIN, key), model)
    # `launch` also passes Claude Code's variables as settings, over those in the user's own file.
    words = () if AGENTS[name] is Agent.CLAUDE else wanted.words
    assert found.words == (AGENTS[name], *words)
    assert found.unset == wanted.unset
    assert found.variables.keys() == wanted.variables.keys()
    for variable, text in wanted.variables.items():
        read = json.loads if variable == "OPENCODE_CONFIG_CONTENT" else str
        assert read(found.variables[variable]) == read(text)


def test_names_and_keys_are_quoted_in_each_language(call: Call) -> None:
    name = "a'b\"c\\d$e `f`"
    made = snippets(call, key="k'e$y", id=name)
    for shell in ("curl", "Open WebUI", *AGENTS):
        assert shlex.split(made[shell])
    words = _words(made["curl"])
    assert words[words.index("-H", 4) + 1] == "authorization: Bearer k'e$y"
    assert json.loads(words[words.index("-d") + 1])["model"] == name
    for code in ("Python", "Anthropic SDK"):
        literals = {node.value for node in ast.walk(ast.parse(made[code])) if isinstance(node, ast.Constant)}
        assert {name, "k'e$y"} <= literals


def test_models_of_other_tasks_have_snippets_of_their_own(call: Call) -> None:
    assert f"{ORIGIN}/v1/embeddings" in snippets(call, tasks=["embed"])["curl"]
    made = snippets(call, tasks=["rerank"])
    assert f"{ORIGIN}/v1/rerank" in made["curl"]
    assert "Claude Code" not in made
    assert json.loads(shlex.split(made["curl"])[-1])["model"] == "pocket"


def test_a_conversation_as_curl_sends_exactly_its_body(call: Call) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "It's\nEND\n$HOME `x`"}]}
    head, _, rest = call("recipes.js", "curlOf", ORIGIN, "k'ey", "/v1/chat/completions", body).partition("\n")
    assert shlex.split(head) == [
        *("curl", "-N", f"{ORIGIN}/v1/chat/completions", "-H", "content-type: application/json"),
        *("-H", "authorization: Bearer k'ey", "-d", "@-", "<<END"),
    ]
    text, _, end = rest.rpartition("\n")
    assert (json.loads(text), end) == (body, "END")
    assert "END" not in text.splitlines()
    assert "authorization" not in call("recipes.js", "curlOf", ORIGIN, "", "/v1/chat/completions", body)
