"""Real agents' conversations, replayed turn by turn on templates with each family's guards.

The requests are those that the agents sent (`tests.conformance.recorder`). They pass the gateway and become a
prompt by the family's template and tokenizer; the prefix index says what a worker has of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.conversation import unpack
from protocol.messages import Generate
from protocol.types import TokenizeOptions
from tests.broker.asgi import Exchange, run, until
from tests.conformance import recorder
from tests.conformance.recorder import Request
from tests.e2e.test_chat_families import Model
from tests.factories import accepted, finished, reused
from tests.models.chat_families import FAMILIES
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.sharing import message_at
from worker.input.prompts.prompt import PromptRules
from worker.values import CacheSpec, SamplingParams

GUARDS = {
    "Qwen 3.5 to 3.8": "a system message only first",
    "Gemma 2": "no system message, strict alternation",
    "Devstral": "strict alternation, short ids",
    "DeepSeek R1": "arguments as text",
    "Llama 3": "one call in each message",
    "Kimi K2": "ids that count all calls",
    "gpt-oss": "no text beside a call's thought",
}
CACHED_MIN = 0.96
"""The part of a turn's prompt, which the next one begins with, that is found again."""
RULES = PromptRules(context_length=131_072, vocabulary=2048, defaults=SamplingParams())


async def sent(model: Model, request: Request, **changed: Any) -> Generate:
    """Return what the gateway sends to the worker for a request, whose answer is empty."""
    house = model.house
    body = json.dumps(request.body | {"model": "m"} | changed).encode()
    headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
    number = len(house.requests())
    exchange = Exchange(house.app, "POST", request.path, body, headers)
    await until(lambda: len(house.requests()) > number or exchange.task.done())
    assert not exchange.task.done(), exchange.body
    asked = house.requests()[number]
    house.line.say("w", accepted("w", asked.id), reused("w", asked.id), finished("w", asked.id))
    assert (await exchange.end()).status == 200, exchange.body
    return asked


async def shares(model: Model, turns: Sequence[Request], index: PrefixIndex) -> list[float]:
    """Return how much of the prompt before it each turn finds in the cache, from the second on."""
    found, before = list[float](), 0
    for request in turns:
        asked = replace(await sent(model, request), tokenizing=TokenizeOptions(tokens=True))
        tokens = model.preparer.tokenize(asked, ()).tokens
        known = index.find(tokens, limit=len(tokens)).length
        if before:
            found.append(min(1.0, known / before))
        if known < len(tokens):
            index.add(tokens, known, len(tokens), "", 1)
        before = len(tokens)
    return found


CROSSED = ("claude", "codex", "opencode")
"""One recording of each API, tried on all guards; the others on the first one."""
TRIED = [
    (guard, name)
    for number, guard in enumerate(GUARDS)
    for name in recorder.names()
    if number == 0 or name in CROSSED
]
TRIED.append(("Devstral", "codex-several-agents"))  # a sub-agent begins behind a tool's result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    made: dict[str, Model] = {}

    def model(guard: str) -> Model:
        if guard not in made:
            made[guard] = Model(FAMILIES[guard], tmp_path_factory.mktemp("family"), RULES)
        return made[guard]

    yield model
    for each in made.values():
        each.house.close()


@pytest.mark.parametrize(("guard", "name"), TRIED)
def test_each_turn_of_an_agent_is_served_from_the_cache(
    guard: str, name: str, models: Callable[[str], Model]
) -> None:
    async def replay() -> None:
        index = PrefixIndex(CacheSpec())
        is_whole = guard == next(iter(GUARDS)) or name not in CROSSED
        for turns in recorder.load(name).conversations()[: 1 + is_whole]:
            found = await shares(models(guard), turns, index)
            assert len(turns) > 2
            assert min(found) >= CACHED_MIN, found

    run(replay())


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_message_that_has_changed_is_named(
    guard: str, place: int, models: Callable[[str], Model]
) -> None:
    async def replay() -> None:
        model, index = models(guard), PrefixIndex(CacheSpec())
        last = recorder.load("opencode").conversations()[0][-1]
        messages = [dict(message) for message in last.body["messages"]]
        messages[place]["content"] = "Changed."
        before, asked = await sent(model, last), await sent(model, last, messages=messages)
        stored, found = (model.preparer.prepare(each, ()) for each in (before, asked))
        index.add(stored.tokens, 0, len(stored.tokens), "", 1)
        known = index.find(found.tokens, limit=len(found.tokens)).known
        number, role = message_at(found.message_ends, known)
        if number is None:  # its template writes both into one turn
            assert (guard, place) in {("Gemma 2", 0), ("Gemma 2", 1)}
            return
        said = (unpack(asked).messages or [])[number]
        assert (said["content"], said["role"]) == ("Changed.", role)

    run(replay())
