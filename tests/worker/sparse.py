"""Rows with skipped prompt spans, compared with rows in which these spans are masked.

    python -m tests.worker.sparse [--seeds 4] [--families gemma3,olmo3]

Prints for every family whether prompt spans can be skipped, and what is wrong. `whole`: a full prompt, run in
chunks with position-based masks, diverges from upstream. `parts`: rows with gaps, batched with others,
diverge from rows that mask them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from tests.models import whole_families
from tests.models.families import PREFIX, REFUSED, listed
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from worker.interfaces import Engine, Model
from worker.load.load import ModelLoader
from worker.process.preload import preload_openblas
from worker.runner.kv import buckets, snapshots
from worker.runner.kv.sparse_rows import Span, hiding
from worker.runner.runner import BatchEngine
from worker.values import CacheSegment, SamplingParams

CHUNK_TOKENS = 16
ANSWER_TOKENS = 24
TIE = 1e-3
"""Gap between the logits of two tokens that rounding may swap."""
_VOCABULARY = 2000
_JOIN_STEPS = 4
_DRAFTED_STEPS = range(10, 14)


@dataclass(frozen=True)
class Sparse:
    """A row's prompt and its skipped spans."""

    prompt: tuple[int, ...]
    spans: tuple[Span, ...] = ()


@dataclass
class GreedyTokens:
    """The greedy tokens, and the logits of each."""

    tokens: list[int] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)

    def first_other(self, tokens: Sequence[int]) -> int | None:
        """Return where `tokens` diverges, unless rounding may be the cause."""
        for at, (mine, other) in enumerate(zip(self.tokens, tokens, strict=False)):
            if mine != other:
                return at if float(self.logits[at][mine] - self.logits[at][other]) > TIE else None
        return None


def hidden(engine: BatchEngine, row: Sparse, count: int) -> GreedyTokens:
    """Return the answer of a row with masked spans. All columns exist; states are those before each span."""
    model, caches, begin = engine._model, engine._fresh(), 0
    for first, last in row.spans:
        given = hiding(caches, *(span for span in row.spans if span[1] <= begin))
        model(mx.array([row.prompt[begin:first]], mx.uint32), cache=given)
        states = snapshots.states_of(caches, 0)
        model(mx.array([row.prompt[first:last]], mx.uint32), cache=given)
        columns, _ = snapshots.columns_of(caches, 0, 0, last)
        caches, begin = engine._fresh(), last
        snapshots.rebuild(caches, [CacheSegment(columns, 0, last, last)], states)
    return _said(engine, hiding(caches, *row.spans), row.prompt[begin:], count)


def chunked(engine: BatchEngine, prompt: Sequence[int], count: int) -> GreedyTokens:
    """Return the answer of a single row whose prompt is run in chunks with position-based masks."""
    caches, tokens = hiding(engine._fresh()), list(prompt)
    *chunks, rest = [tokens[at : at + CHUNK_TOKENS] for at in range(0, len(tokens), CHUNK_TOKENS)]
    for chunk in chunks:
        engine._model(mx.array([chunk], mx.uint32), cache=caches)
    return _said(engine, caches, rest, count)


def _said(engine: BatchEngine, caches: list[Any], tokens: Sequence[int], count: int) -> GreedyTokens:
    said = GreedyTokens()
    for _ in range(count):
        logits = engine._model(mx.array([list(tokens)], mx.uint32), cache=caches)[0, -1]
        likeliest: Any = mx.argmax(logits).item()
        said.tokens.append(int(likeliest))
        said.logits.append(logits)
        tokens = said.tokens[-1:]
    return said


def begin(engine: Engine, name: str, row: Sparse) -> None:
    """Prefill the row, skipping its spans, and start it."""
    at = 0
    for first, last in [*row.spans, (len(row.prompt) - 1, 0)]:
        engine.prefill({name: row.prompt[at:first]})
        if last:
            engine.skip_tokens(name, first, last)
        at = last
    engine.start(name, row.prompt, len(row.prompt), SamplingParams())


def played(engine: Engine, rows: Mapping[str, Sparse], count: int) -> dict[str, list[int]]:
    """Run the rows for `count` steps; they join one after another. Rows without gaps get drafts now and then,
    so that they leave the common batch and return."""
    said: dict[str, list[int]] = {name: [] for name in rows}
    coming = dict(rows)
    for step in range(count):
        if step % _JOIN_STEPS == 0 and coming:
            name = next(iter(coming))
            begin(engine, name, coming.pop(name))
        dense = [name for name, row in rows.items() if not row.spans and name not in coming]
        drawn = engine.step(dict.fromkeys(dense, (5, 6)) if step in _DRAFTED_STEPS else {})
        for name, token in drawn.tokens.items():
            said[name] += [token, *(each.token for each in drawn.further.get(name, ()))]
    for name in rows:
        engine.drop(name)
    return said


def faults(engine: BatchEngine, folder_name: str, seed: int, oracle: Oracle) -> list[str]:
    """Return what is wrong with a few rows of the model in the folder `folder_name`."""
    rng = random.Random(f"{folder_name} {seed}")
    rows = {f"row {number}": _drawn(rng, gaps=number) for number in range(4)}
    requests = [{"tokens": row.prompt, "max_tokens": ANSWER_TOKENS} for row in rows.values()]
    oracle.ask(model_folder(folder_name), requests)
    said = played(engine, rows, ANSWER_TOKENS)
    right = oracle.hear()
    found: list[str] = []
    for (name, row), answer in zip(rows.items(), right, strict=True):
        whole = chunked(engine, row.prompt, ANSWER_TOKENS)
        if whole.first_other(answer["tokens"]) is not None:
            found.append(f"seed {seed}, {name}: whole")
        if hidden(engine, row, len(said[name])).first_other(said[name]) is not None:
            found.append(f"seed {seed}, {name}: parts")
    return found


def differing(engine: Engine, folder_name: str, seed: int) -> list[str]:
    """Return the rows whose answers differ from those of an engine in one process."""
    rng = random.Random(seed)
    rows = {f"row {number}": _drawn(rng, gaps=2 * bool(number)) for number in range(4)}
    alone = played(BatchEngine(load_model(model_folder(folder_name))[0]), rows, ANSWER_TOKENS)
    said = played(engine, rows, ANSWER_TOKENS)
    assert min(map(len, alone.values())) > ANSWER_TOKENS // 3
    return [row for row in rows if said[row] != alone[row]]


def _drawn(rng: random.Random, gaps: int) -> Sparse:
    """Draw a row with `gaps` skipped spans."""
    prompt = tuple(rng.randrange(1, _VOCABULARY) for _ in range(rng.randint(50, 130)))
    places = sorted(rng.sample(range(1, len(prompt) - 1), 2 * gaps))
    return Sparse(prompt, tuple(zip(places[::2], places[1::2], strict=True)))


def _told(family: str, seeds: int, oracle: Oracle) -> str:
    name = PREFIX + family
    model = ModelLoader(str(model_folder(name))).load(lambda done, total: None)
    assert isinstance(model, Model)
    engine = model.engine
    assert isinstance(engine, BatchEngine)
    if not engine.can_skip_tokens:
        return "refused"
    found = [fault for seed in range(seeds) for fault in faults(engine, name, seed, oracle)]
    return "; ".join(found) or "equal"


def main() -> int:
    """Return 1 if something is wrong."""
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--families", default="", help="names with commas between; default: all")
    asked = parser.parse_args()
    out = {*REFUSED, *whole_families.REFUSED}
    every = [family for family in (*listed(), *whole_families.listed()) if family not in out]
    buckets.COLUMNS_STEP = 16
    told: dict[str, str] = {}
    with Oracle() as oracle:
        for family in asked.families.split(",") if asked.families else every:
            told[family] = _told(family, asked.seeds, oracle)
            print(f"{family}: {told[family]}", flush=True)
    counts = {verdict: sum(each == verdict for each in told.values()) for verdict in ("equal", "refused")}
    print(f"{len(told)} families: {counts}")
    return 0 if sum(counts.values()) == len(told) else 1


if __name__ == "__main__":
    raise SystemExit(main())
