"""The sides and cases of `bench.drafts`. Imports MLX, so import this only after the BLAS has been loaded."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from bench.models import random_tokens
from bench.ours import Ours
from bench.timing import Work
from protocol.conversation import pack
from protocol.messages import Generate
from protocol.types import Sampling, StructuredOutput
from worker.interfaces import Model
from worker.runner.kv.batch import CacheBatch
from worker.values import EngineRequest, SamplingParams

PROMPT_TOKENS = 126
ANSWER_TOKENS = 192
EDITED_EVERY = 40
"""In the answer, one of this many tokens replaces three others."""
CONTEXT = 512
"""Context length in tokens of the rows whose passes are measured."""
PASSES = 4


@dataclass(frozen=True)
class Case:
    """Requests that are submitted at once."""

    requests: Sequence[EngineRequest]


class Drafted:
    """Our loop, with or without speculation."""

    def __init__(self, model: Model, rows: int, is_on: bool) -> None:
        self._ours = Ours(model, rows, drafting=is_on)
        self._numbers = count()
        self._engine = model.engine
        self._tokens = self._goal = self._passes = 0

    def begin(self, case: Case) -> None:
        """Submit the requests and run until their prompts are prefilled and each row has tokens."""
        number = next(self._numbers)
        requests = [replace(each, id=f"{number}-{each.id}") for each in case.requests]
        self._ours.submit_prepared(requests)
        self._goal = sum(each.max_tokens for each in requests)
        self._goal -= self._ours.run(len(requests))

    def run(self) -> int:
        """Run the rest, and return its number of tokens."""
        before = self._ours.steps
        done = self._ours.run(self._goal)
        mx.synchronize()
        self._passes += self._ours.steps - before
        self._tokens += done
        return done

    def tokens_a_pass(self) -> float:
        """Tokens per pass, of all rows together."""
        return self._tokens / max(1, self._passes)

    def drafted(self) -> tuple[int, int]:
        """Return the draft tokens accepted and rejected."""
        return self._ours.drafted

    def close(self) -> None:
        """Drop all requests."""
        self._ours.close()


# --- cases ---


def case_of(kind: str, folder: Path, model: Model, rows: int) -> Case:
    """Return `rows` requests of one kind."""
    if kind == "strict":
        return Case([_strict(model, row) for row in range(rows)])
    plain = [_plain(row) for row in range(rows)]
    if kind == "own":
        return Case(plain)
    answers = _answered(model, plain)
    predict = {"rewritten": _edited, "misled": _misleading}[kind]
    return Case([replace(each, prediction=predict(answers[each.id])) for each in plain])


def _plain(row: int) -> EngineRequest:
    sampling = SamplingParams(seed=row, temperature=1.0)
    prompt = tuple(random_tokens(PROMPT_TOKENS, row))
    return EngineRequest(str(row), prompt, sampling, (), ANSWER_TOKENS, frozenset())


def _strict(model: Model, row: int) -> EngineRequest:
    request = Generate(
        incarnation="bench",
        id=str(row),
        sampling=Sampling(seed=row, temperature=1.0),
        max_tokens=ANSWER_TOKENS,
        messages=pack([{"role": "user", "content": f"Make up number {row}."}]),
        form=StructuredOutput(kind="json_schema", text=json.dumps(_rows(row)), param="response_format"),
        ignore_eos=True,
    )
    return model.open_preparer(4096).prepare(request, ())


def _rows(seed: int) -> dict[str, Any]:
    """Return the schema of a long list of objects with strings of random text."""
    dice = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": dice.randint(8, 40)},
        {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        {"type": "string", "format": "date-time"},
        {"enum": [f"{word}{dice.randint(0, 99)}" for word in ("red", "green", "north", "south")]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5},
        {"type": "number"},
    ]
    names = dice.sample(("name", "street", "price", "status", "owner", "note"), len(kinds))
    properties = dict(zip(names, kinds, strict=True))
    item = {
        "type": "object", "properties": properties, "required": names[:4], "additionalProperties": False
    }  # fmt: skip
    return {"type": "array", "minItems": 40, "items": item}


def _answered(model: Model, requests: Sequence[EngineRequest]) -> Mapping[str, Sequence[int]]:
    """Return the answer of each request without drafts."""
    engine = model.engine
    said: dict[str, list[int]] = {each.id: [] for each in requests}
    for each in requests:
        engine.prefill({each.id: each.tokens[:-1]})
        engine.start(each.id, each.tokens, len(each.tokens), each.sampling)
    while min(map(len, said.values())) < ANSWER_TOKENS:
        for row, token in engine.step().tokens.items():
            said[row].append(token)
    for each in requests:
        engine.drop(each.id)
    return said


def _edited(answer: Sequence[int]) -> tuple[int, ...]:
    """Return a file of which `answer` is the rewritten version."""
    dice = random.Random(len(answer))
    file: list[int] = []
    for place, token in enumerate(answer):
        file += random_tokens(3, dice.randrange(10**6)) if place % EDITED_EVERY == 20 else [token]
    return tuple(file)


def _misleading(answer: Sequence[int]) -> tuple[int, ...]:
    """Return every three tokens of the answer, followed by tokens that do not follow them in it."""
    text: list[int] = []
    for end in range(3, len(answer)):
        text += [*answer[end - 3 : end], *((token + 1) % 1900 for token in answer[end : end + 4])]
    return tuple(text)


# --- passes ---


class Passes:
    """Forward passes of rows with several tokens each, all of which are accepted."""

    def __init__(self, folder: Path) -> None:
        self._network: Any = load_model(folder)[0]

    def feeding(self, rows: int, width: int) -> Callable[[], Work]:
        """Return a function that runs passes of `rows` rows with `width` tokens each; 0: one, in the layout
        of plain steps."""
        own = make_prompt_cache(self._network)
        self._network(mx.array([random_tokens(CONTEXT, 1)]), cache=own)
        mx.eval([cache.state for cache in own])
        fresh = make_prompt_cache(self._network)
        batch = CacheBatch(fresh)
        batch.rearrange([], [own] * rows, [CONTEXT] * rows)
        return partial(self._passes, batch, rows, width)

    def _passes(self, batch: CacheBatch, rows: int, width: int) -> Work:
        tokens = mx.array([random_tokens(max(1, width), 2)] * rows)
        began = time.process_time()
        for _ in range(PASSES):
            batch.begin([max(1, width)] * rows, may_revert=width > 0)
            logits = self._network(tokens, cache=batch.caches)
            mx.eval(logits, batch.finish())
            if width:
                batch.commit([1] * rows)
            else:
                batch.advance()
        return Work(PASSES, time.process_time() - began)
