"""Random lives of rows on the tiny models of every architecture, held against upstream alone.

    python -m tests.worker.zoo --seeds 100 --architecture jamba --architecture llama4

plays a hundred seeds on each (on all without `--architecture`) and tells every row that differs, with the gap
between the two tokens where upstream stood (`borders` for sampled rows): one near zero is a tie that rounding
decides.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.models.configs import CONFIGS
from tests.models.families import of_mlx_vlm
from tests.models.fixtures import model_folder
from tests.models.zoo import ZOO
from tests.oracle import Oracle, open_whole
from tests.worker.borders import distance
from tests.worker.guesses import guessed
from tests.worker.rules import RuleGrammar, allows
from worker.contract import Cut, Draw, Engine, Model, Piece, Shape
from worker.preload import preload_openblas

ARCHITECTURES = (*CONFIGS, *ZOO)
ROWS = 14
"""In one scenario, if not told otherwise."""
PROMPT_TOKENS_MAX = 120
ANSWER_TOKENS_MAX = 32
BUFFER_TOKENS = 256
"""Upstream's buffers, and ours, grow by so many; a few prompts come close to it."""
DRAFTED_MAX = 20
"""More than a row is fed in a step."""
DISTURBANCES = {"forked", "restored", "dropped"}
TIE = 1e-3
"""A gap between two tokens that rounding may turn about."""
_VOCABULARY = 2000

_GREEDY = Draw()
_DRAWS = (
    Draw(temperature=1.0),
    Draw(temperature=0.8, top_p=0.9),
    Draw(temperature=1.5, top_k=40, min_p=0.02),
    Draw(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
)


@dataclass(frozen=True)
class Job:
    """A row's prompt and how many tokens it answers."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    draw: Draw = _GREEDY


@dataclass(frozen=True)
class Difference:
    """The first token in which a row differs from what it says alone."""

    job: Job
    index: int
    expected: tuple[int, ...]
    said: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """What was stored of a row that had been fed `tokens`."""

    tokens: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    cuts: tuple[Cut, ...]
    states: Cut | None

    def stops(self, shape: Shape) -> list[int]:
        """The positions from which a row can go on."""
        whole = {
            at
            for (_, last), cut in zip(self.runs, self.cuts, strict=True)
            for at in range(cut.whole_from, last)
        }
        stops = [len(self.tokens)] if shape.has_states else range(1, len(self.tokens) + 1)
        return [at for at in stops if whole.issuperset(range(max(0, at - shape.window), at))]

    def pieces(self, until: int) -> list[Piece]:
        runs = zip(self.runs, self.cuts, strict=True)
        return [
            Piece(cut.payload, first, last, min(last, until) - first)
            for (first, last), cut in runs
            if first < until
        ]


class Life:
    """Plays jobs on an engine, in an order that `rng` draws, and holds the engine to its contract.

    A row is `waiting`, or partly `prefilled` (how many of its tokens are), or `started`. `fed` are the rows
    that the last step has fed: those that the next one must return a token of, but for those `ahead`, which
    have no pass under way.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        rng: random.Random,
        *,
        whole: bool = False,
        expected: Mapping[str, Sequence[int]] | None = None,
        abreast: bool = False,
    ) -> None:
        """`whole`: prompts are run in one piece, which no other row's or an earlier one's is a part of.
        `expected`: what each row will say, to make drafts of; None: none are made. `abreast`: prompts that
        stand at one position are mostly run side by side."""
        self._engine, self._rng, self._whole = engine, rng, whole
        self._is_abreast = abreast
        self._expected = expected
        self._jobs = {job.name: job for job in jobs}
        self._waiting = list(self._jobs)
        self._prefilled: dict[str, int] = {}
        self._started: set[str] = set()
        self._fed: set[str] = set()
        self._ahead: Set[str] = frozenset()
        self._kept: list[Kept] = []
        self.seen: set[str] = set()
        """Which of `DISTURBANCES` have come about."""
        self.answers: dict[str, list[int]] = {name: [] for name in self._jobs}

    def play(self, *, calm: bool = False) -> dict[str, list[int]]:
        """What each row has answered when all have left; `calm`: none is cancelled or preempted."""
        while self._waiting or self._prefilled or self._started:
            self._arrive()
            self._prefill()
            self._start()
            if not calm:
                self._keep()
                self._disturb()
            if self._started:
                self._step()
        assert self._engine.cache_bytes() == 0
        return self.answers

    def _tokens(self, name: str) -> tuple[int, ...]:
        return (*self._jobs[name].prompt, *self.answers[name])

    def _arrive(self) -> None:
        for name in list(self._waiting):
            parents = [row for row in self._prefilled if not self._whole and self._may_begin_as(name, row)]
            if parents and self._rng.random() < 0.8:
                parent = self._rng.choice(parents)
                self._engine.fork(parent, name)
                self.seen.add("forked")
                self._prefilled[name] = self._prefilled[parent]
            elif self._rng.random() < 0.2:
                self._prefilled[name] = self._restore(name)
            else:
                continue
            self._waiting.remove(name)

    def _keep(self) -> None:
        """Store some rows as they stand, in runs of any length."""
        shape = self._engine.shape
        for name in [*self._prefilled, *sorted(self._started)]:
            fed = self._tokens(name)[: self._prefilled.get(name)]
            if name in self._started and name not in self._fed:
                fed = fed[:-1]
            if shape is None or not fed or self._rng.random() > 0.05:
                continue
            borders = sorted({0, len(fed), *(self._rng.randint(0, len(fed)) for _ in range(3))})
            runs = tuple(itertools.pairwise(borders))
            cuts, states = self._engine.cut(name, runs, states=shape.has_states)
            self._kept.append(Kept(fed, runs, tuple(cuts), states))

    def _restore(self, name: str) -> int:
        """Begin with what was stored of any row that began alike, if there is such; how many tokens."""
        tokens, shape = self._tokens(name), self._engine.shape
        found = [
            (kept, at)
            for kept in self._kept
            for at in (kept.stops(shape) if shape else ())
            if at < len(tokens) and kept.tokens[:at] == tokens[:at]
        ]
        if not found:
            return 0
        kept, at = self._rng.choice(found)
        self._engine.restore(name, kept.pieces(at), kept.states.payload if kept.states else None)
        self.seen.add("restored")
        return at

    def _may_begin_as(self, name: str, parent: str) -> bool:
        done = self._prefilled[parent]
        tokens = self._tokens(name)
        return 0 < done < len(tokens) and tokens[:done] == self._tokens(parent)[:done]

    def _prefill(self) -> None:
        is_abreast = self._is_abreast and self._rng.random() < 0.8
        chunks = self._abreast() if is_abreast else self._ragged()
        if not chunks:
            return
        self._engine.prefill(chunks)
        for name, chunk in chunks.items():
            self._prefilled[name] += len(chunk)

    def _ragged(self) -> dict[str, tuple[int, ...]]:
        """A piece of any length of some rows."""
        chunks = {}
        for name, done in self._prefilled.items():
            left = self._tokens(name)[done:-1]
            if left and self._rng.random() < 0.7:
                chunks[name] = left if self._whole else left[: self._rng.randint(1, 50)]
        return chunks

    def _abreast(self) -> dict[str, tuple[int, ...]]:
        """A piece of the same length of all rows that stand where one of them does."""
        begun = {name: done for name, done in self._prefilled.items() if done < len(self._tokens(name)) - 1}
        at = self._rng.choice(sorted(begun.values())) if begun else 0
        lefts = {name: self._tokens(name)[at:-1] for name, done in begun.items() if done == at}
        width = min([self._rng.randint(1, 50), *map(len, lefts.values())])
        return {name: left[:width] for name, left in lefts.items()}

    def _start(self) -> None:
        for name, done in list(self._prefilled.items()):
            tokens = self._tokens(name)
            if done == len(tokens) - 1 and self._rng.random() < 0.6:
                job = self._jobs[name]
                self._engine.start(name, tokens, len(job.prompt), job.draw)
                del self._prefilled[name]
                self._started.add(name)

    def _disturb(self) -> None:
        """Cancel some rows, and preempt some: those come again, with what they have answered."""
        rate = 0.5 if self._rng.random() < 0.03 else 0.01
        for name in [*self._prefilled, *sorted(self._started)]:
            if self._rng.random() < rate:
                self._drop(name)
                self.seen.add("dropped")
                if self._rng.random() < 0.8:
                    self._waiting.append(name)

    def _step(self) -> None:
        step = self._engine.step(self._drafts())
        owed = self._fed - self._ahead
        assert step.tokens.keys() >= owed if self._expected else step.tokens.keys() == owed
        self._fed, self._ahead = set(self._started), step.further.keys()
        for name, token in step.tokens.items():
            self.answers[name] += [token, *(drawn.token for drawn in step.further.get(name, ()))]
            if len(self.answers[name]) >= self._jobs[name].tokens:
                del self.answers[name][self._jobs[name].tokens :]
                self._drop(name)

    def _drafts(self) -> dict[str, list[int]]:
        """What some rows may say next: right, right at first, wrong, and beyond their ends."""
        drafts: dict[str, list[int]] = {}
        if self._expected is None or self._rng.random() < 0.3:
            return drafts
        if self._engine.drafter is not None:
            rows = {name: self._tokens(name) for name in sorted(self._started)}
            return guessed(self._engine.drafter, rows, self._rng, _VOCABULARY)
        for name in sorted(self._started):
            if self._rng.random() < 0.4:
                continue
            count, done = self._rng.randint(1, DRAFTED_MAX), len(self.answers[name])
            right = [*self._expected[name][done : done + count]]
            draft = [*right, *(self._rng.randrange(_VOCABULARY) for _ in range(count - len(right)))]
            if self._rng.random() < 0.5:
                draft[self._rng.randrange(count)] = self._rng.randrange(_VOCABULARY)
            drafts[name] = draft
        return drafts

    def _drop(self, name: str) -> None:
        self._engine.drop(name)
        self._prefilled.pop(name, None)
        self._started.discard(name)
        self._fed.discard(name)


def draw_jobs(rng: random.Random, rows: int = ROWS) -> list[Job]:
    """Short and long prompts, some with the beginning of another, or all of it; a third of them sampled, a
    third, of both kinds, held to a grammar."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(rows):
        length = rng.choice((1, 2, rng.randint(3, 40), rng.randint(3, PROMPT_TOKENS_MAX)))
        if rng.random() < 0.08:
            length = rng.randint(BUFFER_TOKENS - ANSWER_TOKENS_MAX, BUFFER_TOKENS + 2)
        prompt = tuple(rng.randrange(_VOCABULARY) for _ in range(length))
        if prompts and rng.random() < 0.5:
            other = rng.choice(prompts)
            cut = rng.choice((len(other), rng.randint(1, len(other))))
            prompt = (*other[:cut], *prompt[cut:])
        prompts.append(prompt)
    return [
        Job(
            name=f"row {row}",
            prompt=prompt,
            tokens=rng.choice((1, rng.randint(2, ANSWER_TOKENS_MAX), ANSWER_TOKENS_MAX)),
            draw=replace(_draw(rng) if row % 3 == 2 else _GREEDY, grammar=_grammar(row)),
        )
        for row, prompt in enumerate(prompts)
    ]


def _grammar(row: int) -> RuleGrammar | None:
    return RuleGrammar(seed=row) if row % 4 in (1, 2) else None


def _draw(rng: random.Random) -> Draw:
    return replace(rng.choice(_DRAWS), seed=rng.getrandbits(63))


def load(architecture: str, draft: str | None = None, *, uses_heads: bool = False) -> Model:
    """Its tiny model, by the worker's own loader, with that of another one as its draft model."""
    from worker.models.load import ModelLoader

    loader = ModelLoader(
        str(model_folder(architecture)),
        draft_model=str(model_folder(draft)) if draft else None,
        uses_heads=uses_heads,
    )
    return loader.load(lambda done, total: None)


@dataclass(frozen=True)
class Played:
    """What came of a scenario. `seen`: which of `DISTURBANCES` came about; `tokens`: how many different
    ones upstream's liveliest answer has."""

    differences: list[Difference]
    seen: set[str]
    tokens: int


def differences(
    model: Model,
    architecture: str,
    seed: int,
    oracle: Oracle,
    rows: int = ROWS,
    *,
    is_whole: bool = False,
    drafted: bool = False,
) -> list[Difference]:
    """Play one scenario. `is_whole`: all that can happen to a row is expected to happen in it."""
    played = play(model, architecture, seed, oracle, rows, drafted=drafted)
    assert not is_whole or played.seen == possible(model), f"seed {seed} is of a calm life"
    return played.differences


def possible(model: Model) -> set[str]:
    """What can happen to the rows of a model."""
    return DISTURBANCES if model.engine.shape else DISTURBANCES - {"restored"}


def play(
    model: Model,
    architecture: str,
    seed: int,
    oracle: Oracle,
    rows: int = ROWS,
    *,
    whole: bool = False,
    drafted: bool = False,
) -> Played:
    """Play one scenario; greedy rows are held against upstream, sampled ones against themselves alone.

    `whole`: with prompts in one piece, and none preempted. `drafted`: with drafts. Of four scenarios one has
    prompts side by side.
    """
    rng = random.Random(f"{architecture} {seed}")
    jobs = draw_jobs(rng, rows)
    greedy = [job for job in jobs if _is_greedy(job)]
    requests = [_question(job) for job in greedy]
    oracle.ask(model_folder(architecture), requests)
    expected = _alone(model, jobs, rng) if drafted else None
    abreast = seed % 4 == 3 and not whole
    life = Life(model.engine, jobs, rng, whole=whole, expected=expected, abreast=abreast)
    try:
        said = life.play(calm=whole)
    finally:
        answers = oracle.hear()  # or the next one to ask would be given them
    for job in jobs:
        if isinstance(job.draw.grammar, RuleGrammar):
            job.draw.grammar.check(said[job.name])
    alone = {job.name: answer["tokens"] for job, answer in zip(greedy, answers, strict=True)}
    for job in jobs:
        if job.name not in alone:
            alone |= Life(model.engine, [job], rng, whole=whole).play(calm=True)
    found = [found for job in jobs if (found := _difference(job, alone[job.name], said[job.name]))]
    return Played(found, life.seen, max(len(set(answer["tokens"])) for answer in answers))


def _alone(model: Model, jobs: Sequence[Job], rng: random.Random) -> dict[str, Sequence[int]]:
    """What each row says by itself."""
    return {job.name: Life(model.engine, [job], rng).play(calm=True)[job.name] for job in jobs}


def _is_greedy(job: Job) -> bool:
    return replace(job.draw, grammar=None) == _GREEDY


def _question(job: Job) -> dict[str, Any]:
    """What the oracle is asked."""
    question: dict[str, Any] = {"tokens": job.prompt, "max_tokens": job.tokens}
    return question | ({"rule": job.draw.grammar.seed} if isinstance(job.draw.grammar, RuleGrammar) else {})


def _difference(job: Job, expected: Sequence[int], said: Sequence[int]) -> Difference | None:
    """A row that was cancelled has said less, and is held to that."""
    for index, (ours, theirs) in enumerate(zip(said, expected, strict=False)):
        if ours != theirs:
            return Difference(job, index, tuple(expected), tuple(said))
    return None


def gap(architecture: str, found: Difference) -> float:
    """Where a row went another way: how far upstream's logits of the two tokens are apart, or for a sampled
    row without penalties how near the draw was to another token, or where they are ranked, these two."""
    import mlx.core as mx

    tokens = mx.array([[*found.job.prompt, *found.expected[: found.index]]])
    logits = _logits(architecture, tokens)
    if _is_greedy(found.job):
        return abs(float(logits[found.expected[found.index]] - logits[found.said[found.index]]))
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    if isinstance(found.job.draw.grammar, RuleGrammar):
        rule = allows(found.job.draw.grammar.seed, found.expected[: found.index])
        exact[~_allowed(rule, len(exact))] = -np.inf
    apart = distance(exact, found.job.draw, tokens.shape[1])
    if not found.job.draw.top_k:
        return apart
    # Tokens are ranked before one is drawn: two that are as likely may change places.
    ours, theirs = exact[found.said[found.index]], exact[found.expected[found.index]]
    return min(apart, float(abs(ours - theirs)))


def _logits(architecture: str, tokens: Any) -> Any:
    """Upstream's of what follows, in one pass."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    from mlx_vlm.models.cache import make_prompt_cache as whole_cache

    folder = model_folder(architecture)
    if of_mlx_vlm(architecture):
        whole = open_whole(folder)
        embedded = whole.get_input_embeddings(tokens, None, mask=tokens * 0 + 1).to_dict()
        given = {name: value for name, value in embedded.items() if value is not None}
        return whole.language_model(tokens, cache=whole_cache(whole.language_model), **given).logits[0, -1]
    network, _ = load_model(folder)
    return network(tokens, cache=make_prompt_cache(network))[0, -1]


def _allowed(rule: tuple[int, int] | None, vocabulary: int) -> np.ndarray:
    modulus, rest = rule or (1, 0)
    return np.arange(vocabulary) % modulus == rest


def _main() -> int:
    """1 if a row differs and rounding is not the cause."""
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description="Random lives of rows, held against upstream alone.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES)
    arguments = parser.parse_args()
    faults = 0
    with Oracle() as oracle:
        for architecture in arguments.architecture or ARCHITECTURES:
            model = load(architecture)
            count = 0
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                for found in differences(model, architecture, seed, oracle):
                    count += 1
                    is_penalized = found.job.draw.repetition_penalty != 1
                    apart = 0.0 if is_penalized else gap(architecture, found)
                    faults += apart > TIE
                    told = "penalized" if is_penalized else f"gap {apart:.2g}"
                    print(f"{architecture} seed {seed}: {found.job.name}, token {found.index}, {told}")
            shape = model.engine.shape
            print(f"{architecture}: {arguments.seeds} seeds, {count} rows differ; {shape}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(_main())
