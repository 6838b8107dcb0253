"""Forced tokens are drafted: structured outputs take far fewer forward passes, and are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema

from protocol.types import Sampling, StructuredOutput
from tests import factories
from tests.models.fixtures import model_folder
from tests.worker.folders import nothing
from tests.worker.runner.sampling.test_grammar_masks import held_alone
from tests.worker.runner.test_engine_parity import Job, endless_tokenizer
from worker.interfaces import Engine, Model
from worker.load.load import ModelLoader
from worker.runner.runner import BatchEngine
from worker.values import NO_DRAFTS, EngineRequest, SamplingParams, ThinkingBudget

DRAFTED_MAX = 15
TOKENS_MAX, FREE_TOKENS = 150, 30
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "city": {"enum": ["Berlin", "Bergen", "Paris"]},
        "temperature_celsius": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_raining": {"type": "boolean"},
    },
    "required": ["name", "city", "temperature_celsius", "is_raining"],
    "additionalProperties": False,
}
STOCK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "status": {"const": "ok"},
        "warehouse_identifier": {"type": "integer", "minimum": 0, "maximum": 999},
        "last_inventory": {"enum": ["yesterday", "last week"]},
    },
    "required": ["status", "warehouse_identifier", "last_inventory"],
    "additionalProperties": False,
}


@cache
def loaded(name: str) -> Model:
    return ModelLoader(str(model_folder(name))).load(nothing)


def fresh(name: str) -> BatchEngine:
    """Return a new engine whose threads end with the test."""
    engine = loaded(name).engine
    assert isinstance(engine, BatchEngine)
    return BatchEngine(engine._model, engine.capabilities)


def engine_request(name: str, schema: dict[str, Any] | None, temperature: float = 0.0) -> EngineRequest:
    text = "The weather in Paris is fine, 21 degrees, and we have 14 wagons. Tell me as JSON."
    asked = factories.request(
        sampling=Sampling(seed=1, temperature=temperature),
        max_tokens=TOKENS_MAX if schema else FREE_TOKENS,
        messages=[{"role": "user", "content": text}],
        template_kwargs={"enable_thinking": False},
        form=StructuredOutput(kind="json_schema", text=json.dumps(schema)) if schema else None,
    )
    return loaded(name).open_preparer(4096).prepare(asked, ())


@dataclass
class Answer:
    """A row's tokens, and the passes that it took."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    passes: int = 0

    @property
    def is_over(self) -> bool:
        last = self.tokens[-1] if self.tokens else None
        return len(self.tokens) >= self.request.max_tokens or last in self.request.end_tokens

    def gain(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self.is_over:
                self.tokens.append(token)


def said(engine: Engine, requests: Mapping[str, EngineRequest], *, drafted: bool) -> dict[str, Answer]:
    """Run all rows together until each has its answer. A finished row leaves."""
    answers = {row: Answer(request) for row, request in requests.items()}
    for row, request in requests.items():
        engine.prefill({row: request.tokens[:-1]})
        engine.start(row, request.tokens, len(request.tokens), request.sampling)
    while going := [row for row, answer in answers.items() if not answer.is_over]:
        drafts = (
            {row: engine.forced_tokens(row, DRAFTED_MAX).tokens for row in going} if drafted else NO_DRAFTS
        )
        step = engine.step({row: tokens for row, tokens in drafts.items() if tokens})
        for row in going:
            answers[row].passes += 1
            if row in step.tokens:
                further = [drawn.token for drawn in step.further.get(row, ())]
                answers[row].gain([step.tokens[row], *further])
            if answers[row].is_over:
                engine.drop(row)
    return answers


def test_answers_held_to_schemas_take_three_passes_for_four_tokens_at_most() -> None:
    name = "hybrid"
    requests = {
        "weather": engine_request(name, WEATHER),
        "free": engine_request(name, None),
        "stock": engine_request(name, STOCK),
        "drawn": engine_request(name, WEATHER, temperature=1.0),
    }
    engine = fresh(name)
    plain, quick = said(engine, requests, drafted=False), said(engine, requests, drafted=True)
    assert {row: answer.tokens for row, answer in quick.items()} == {
        row: answer.tokens for row, answer in plain.items()
    }
    for row in requests.keys() - {"free"}:
        # One pass more than tokens: the step after the first pass reads the first token.
        assert plain[row].passes == len(plain[row].tokens) + 1
        assert quick[row].passes <= 0.75 * len(quick[row].tokens), row
    for row, schema in (("weather", WEATHER), ("stock", STOCK), ("drawn", WEATHER)):
        tokens, request = plain[row].tokens, requests[row]
        job = Job(row, request.tokens, len(tokens), request.sampling)
        assert row == "drawn" or tokens == held_alone(name, job)
        assert tokens[-1] in request.end_tokens
        jsonschema.validate(json.loads(endless_tokenizer(name).decode(tokens[:-1])), schema)
    alone = said(engine, {"stock": requests["stock"]}, drafted=True)["stock"]
    assert (alone.tokens, engine.cache_bytes()) == (plain["stock"].tokens, 0)
    assert alone.passes <= 0.75 * len(alone.tokens)


def test_the_end_of_a_thought_and_a_forced_beginning_are_certain() -> None:
    engine = fresh("hybrid")
    limit = ThinkingBudget(6, opening=(90,), closing=(91, 92, 93, 94), is_open=True)
    draws = {
        "forced": SamplingParams(forced=(5, 6, 7, 8, 9)),
        "thinking": SamplingParams(thinking_budget=limit),
        "plain": SamplingParams(),
    }
    certain: dict[str, list[int]] = {row: [] for row in draws}
    told: dict[str, list[int]] = {row: [] for row in draws}
    for row, sampling in draws.items():
        engine.prefill({row: (1, 2, 3)})
        engine.start(row, (1, 2, 3, 4), 4, sampling)
    for _ in range(14):
        foreseen = {row: engine.forced_tokens(row, DRAFTED_MAX) for row in draws}
        for row, each in foreseen.items():
            assert each.certain == len(each.tokens)
            certain[row] += [len(told[row]) + place for place in range(each.certain)]
        step = engine.step({row: each.tokens for row, each in foreseen.items() if each.tokens})
        for row in step.tokens:
            told[row] += [step.tokens[row], *(drawn.token for drawn in step.further.get(row, ()))]
    assert told["forced"][:5] == [5, 6, 7, 8, 9]
    assert told["thinking"][6:10] == [91, 92, 93, 94]
    assert certain == {"forced": [*range(5)], "thinking": [*range(6, 10)], "plain": []}
    assert len(told["forced"]) == len(told["plain"]) + 5
    assert len(told["thinking"]) == len(told["plain"]) + 3  # the first was being sampled when it was foreseen
