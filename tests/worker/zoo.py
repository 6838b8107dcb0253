"""Random scenarios of rows on the tiny models of every architecture, compared with upstream alone.

    python -m tests.worker.zoo --seeds 100 --architecture jamba --architecture llama4
    python -m tests.worker.zoo --seeds 1 --architecture smollm2

Runs a hundred seeds on each (on all without `--architecture`) and prints every row that differs, with the
logit gap of the two tokens in upstream (`borders` for sampled rows). A gap near zero is a tie that rounding
decides. `smollm2`: a model that talks, of `make smollm2`; fewer rows, and all with drafts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.configs import CONFIGS
from tests.models.families import of_mlx_vlm
from tests.models.fixtures import model_folder
from tests.models.zoo import ZOO
from tests.oracle import Oracle, open_whole
from tests.system import Process
from tests.worker.borders import distance
from tests.worker.draft_checks import guessed
from tests.worker.rules import RuleGrammar, allows
from worker.interfaces import Engine, Model, ModelError
from worker.process.preload import preload_openblas
from worker.values import (
    NO_TARGETS,
    CacheSegment,
    CacheSlice,
    CacheSpec,
    KVQuantization,
    SamplingParams,
    StepOutput,
)

ARCHITECTURES = (*CONFIGS, *ZOO)
TALKING, TALKING_ROWS = "smollm2", 4
TALKING_FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "models" / TALKING
ROWS = 14
"""Default number of rows in a scenario."""
PROMPT_TOKENS_MAX = 120
ANSWER_TOKENS_MAX = 32
BUFFER_TOKENS = 256
"""Growth step of upstream's buffers and ours; a few prompts come close to it."""
DRAFTED_MAX = 20
"""Longest draft, longer than any that a step verifies."""
DISTURBANCES = {"forked", "restored", "dropped"}
TIE = 1e-3
"""Gap between the logits of two tokens that rounding may swap."""
_VOCABULARY = 2000

_GREEDY = SamplingParams()
_DRAWS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=40, min_p=0.02),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
)


@dataclass(frozen=True)
class Job:
    """A row's prompt and the length of its answer in tokens."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: SamplingParams = _GREEDY


@dataclass(frozen=True)
class Difference:
    """The first token in which a row differs from its answer alone."""

    job: Job
    index: int
    expected: tuple[int, ...]
    said: tuple[int, ...]


@dataclass(frozen=True)
class StoredRow:
    """Cache slices stored from a row with `tokens` in its caches."""

    tokens: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    cuts: tuple[CacheSlice, ...]
    states: CacheSlice | None

    def stops(self, shape: CacheSpec) -> list[int]:
        """Return the positions from which a row can resume."""
        whole = {
            at
            for (_, last), cut in zip(self.runs, self.cuts, strict=True)
            for at in range(cut.complete_from, last)
        }
        stops = [len(self.tokens)] if shape.has_states else range(1, len(self.tokens) + 1)
        return [at for at in stops if whole.issuperset(range(max(0, at - shape.window), at))]

    def pieces(self, until: int) -> list[CacheSegment]:
        runs = zip(self.runs, self.cuts, strict=True)
        return [
            CacheSegment(cut.payload, first, last, min(last, until) - first)
            for (first, last), cut in runs
            if first < until
        ]


class Life:
    """Plays jobs on an engine in an order that `rng` draws, and checks the engine's contract.

    A row is waiting, partly prefilled (by number of its computed tokens), or started. The next step must
    return a token of every row in the last step, except rows whose drafts were accepted, which have no pass
    in flight.
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
        """`whole`: prompts are run in one chunk and share no prefix. `expected`: each row's answer, of which
        drafts are made; None: no drafts. `abreast`: prompts at one position mostly prefill in one call."""
        self._engine, self._rng, self._whole = engine, rng, whole
        self._is_abreast = abreast
        self._expected = expected
        self._jobs = {job.name: job for job in jobs}
        self._waiting = list(self._jobs)
        self._prefilled: dict[str, int] = {}
        self._started: set[str] = set()
        self._fed: set[str] = set()
        self._ahead: Set[str] = frozenset()
        self._kept: list[StoredRow] = []
        self.seen: set[str] = set()
        """Which of `DISTURBANCES` have occurred."""
        self.answers: dict[str, list[int]] = {name: [] for name in self._jobs}

    def play(self, *, calm: bool = False) -> dict[str, list[int]]:
        """Return each row's answer when all have left; `calm`: none is cancelled or preempted."""
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
        """Store the caches of some rows, in slices of any length."""
        shape = self._engine.shape
        for name in [*self._prefilled, *sorted(self._started)]:
            fed = self._tokens(name)[: self._prefilled.get(name)]
            if name in self._started and name not in self._fed:
                fed = fed[:-1]
            if shape is None or not fed or self._rng.random() > 0.05:
                continue
            borders = sorted({0, len(fed), *(self._rng.randint(0, len(fed)) for _ in range(3))})
            runs = tuple(itertools.pairwise(borders))
            cuts, states = self._engine.copy_cache(name, runs, states=shape.has_states)
            self._kept.append(StoredRow(fed, runs, tuple(cuts), states))

    def _restore(self, name: str) -> int:
        """Restore the row from a stored prefix, if there is one; return its length in tokens."""
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
        last = self._last(chunks)
        self._engine.prefill(chunks, NO_TARGETS, last)
        for name, chunk in chunks.items():
            self._prefilled[name] += len(chunk)
        for name in last:
            self._begin(name)

    def _last(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the last tokens of some prompts that end with their chunks."""
        left = {name: self._tokens(name)[self._prefilled[name] + len(chunks[name]) :] for name in chunks}
        able = [name for name in chunks if len(left[name]) == 1]
        return {name: left[name][0] for name in able if self._rng.random() < 0.6}

    def _ragged(self) -> dict[str, tuple[int, ...]]:
        """Return chunks of any length for some rows."""
        chunks = {}
        for name, done in self._prefilled.items():
            left = self._tokens(name)[done:-1]
            if left and self._rng.random() < 0.7:
                chunks[name] = left if self._whole else left[: self._rng.randint(1, 50)]
        return chunks

    def _abreast(self) -> dict[str, tuple[int, ...]]:
        """Return chunks for all rows at the position of a random one, mostly of one length."""
        begun = {name: done for name, done in self._prefilled.items() if done < len(self._tokens(name)) - 1}
        at = self._rng.choice(sorted(begun.values())) if begun else 0
        lefts = {name: self._tokens(name)[at:-1] for name, done in begun.items() if done == at}
        if self._rng.random() < 0.3:
            return {name: left[: self._rng.randint(1, 50)] for name, left in lefts.items() if left}
        width = min([self._rng.randint(1, 50), *map(len, lefts.values())])
        return {name: left[:width] for name, left in lefts.items()}

    def _start(self) -> None:
        for name, done in list(self._prefilled.items()):
            if done == len(self._tokens(name)) - 1 and self._rng.random() < 0.6:
                self._begin(name)

    def _begin(self, name: str) -> None:
        job = self._jobs[name]
        first = self._engine.start(name, self._tokens(name), len(job.prompt), job.sampling)
        del self._prefilled[name]
        self._started.add(name)
        self._take(first)

    def _disturb(self) -> None:
        """Cancel some rows, and preempt some, which return with their answer so far."""
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
        self._take(step)

    def _take(self, step: StepOutput) -> None:
        for name, token in step.tokens.items():
            self.answers[name] += [token, *(drawn.token for drawn in step.further.get(name, ()))]
            if len(self.answers[name]) >= self._jobs[name].tokens:
                del self.answers[name][self._jobs[name].tokens :]
                self._drop(name)

    def _drafts(self) -> dict[str, list[int]]:
        """Return drafts for some rows: right, right at first, wrong, and beyond their ends."""
        drafts: dict[str, list[int]] = {}
        if self._expected is None or self._rng.random() < 0.3:
            return drafts
        if self._engine.drafter is not None:
            rows = {name: self._tokens(name) for name in sorted(self._started)}
            found = guessed(self._engine.drafter, rows, self._rng, _VOCABULARY)
            return {name: draft for name, draft in found.items() if draft}
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
    """Draw short and long prompts, some of which extend or repeat another. A third is sampled; a third, of
    both kinds, has a grammar."""
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
            sampling=replace(_draw(rng) if row % 3 == 2 else _GREEDY, grammar=_grammar(row)),
        )
        for row, prompt in enumerate(prompts)
    ]


def _grammar(row: int) -> RuleGrammar | None:
    return RuleGrammar(seed=row) if row % 4 in (1, 2) else None


def _draw(rng: random.Random) -> SamplingParams:
    return replace(rng.choice(_DRAWS), seed=rng.getrandbits(63))


def _folder(architecture: str) -> Path:
    return TALKING_FOLDER if architecture == TALKING else model_folder(architecture)


def load(
    architecture: str,
    draft: str | None = None,
    *,
    kv_quantization: KVQuantization | None = None,
) -> Model:
    """Load an architecture's tiny model by the worker's own loader, with that of `draft` as its draft
    model. It is probed once for all tests of a run."""
    from worker.load.load import ModelLoader
    from worker.load.options import LoadOptions

    options = LoadOptions(
        draft_model=str(model_folder(draft)) if draft else None,
        kv_quantization=kv_quantization,
        probe_folder=Process.cache,
    )
    loader = ModelLoader(str(_folder(architecture)), options)
    model = loader.load(lambda done, total: None)
    assert isinstance(model, Model)
    return model


@dataclass(frozen=True)
class Played:
    """Outcome of a scenario. `seen`: which of `DISTURBANCES` occurred; `tokens`: distinct tokens in the most
    varied answer of upstream."""

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
    """Play one scenario. `is_whole`: every possible kind of disturbance must occur in it."""
    played = play(model, architecture, seed, oracle, rows, drafted=drafted)
    assert not is_whole or played.seen == possible(model), f"seed {seed} has too few disturbances"
    return played.differences


def possible(model: Model) -> set[str]:
    """Return the disturbances that a model supports."""
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
    """Play one scenario; greedy rows are compared with upstream, sampled ones with themselves alone.

    `whole`: prompts are run in one chunk, and none is preempted. `drafted`: with drafts. One scenario in four
    has prompts at one position in one call.
    """
    rng = random.Random(f"{architecture} {seed}")
    jobs = draw_jobs(rng, rows)
    greedy = [job for job in jobs if _is_greedy(job)]
    kv = model.info.kv_quantization
    requests = [_question(job) | ({"kv": asdict(kv)} if kv else {}) for job in greedy]
    oracle.ask(_folder(architecture), requests)
    expected = _alone(model, jobs, rng) if drafted else None
    abreast = seed % 4 == 3 and not whole
    life = Life(model.engine, jobs, rng, whole=whole, expected=expected, abreast=abreast)
    try:
        said = life.play(calm=whole)
    finally:
        answers = oracle.hear()  # otherwise the next call would get these answers
    for job in jobs:
        if isinstance(job.sampling.grammar, RuleGrammar):
            job.sampling.grammar.check(said[job.name])
    alone = {job.name: answer["tokens"] for job, answer in zip(greedy, answers, strict=True)}
    for job in jobs:
        if job.name not in alone:
            alone |= Life(model.engine, [job], rng, whole=whole).play(calm=True)
    found = [found for job in jobs if (found := _difference(job, alone[job.name], said[job.name]))]
    return Played(found, life.seen, max(len(set(answer["tokens"])) for answer in answers))


def _alone(model: Model, jobs: Sequence[Job], rng: random.Random) -> dict[str, Sequence[int]]:
    """Return each row's answer alone."""
    return {job.name: Life(model.engine, [job], rng).play(calm=True)[job.name] for job in jobs}


def _is_greedy(job: Job) -> bool:
    return replace(job.sampling, grammar=None) == _GREEDY


def _question(job: Job) -> dict[str, Any]:
    """Return the job as a request to the oracle."""
    question: dict[str, Any] = {"tokens": job.prompt, "max_tokens": job.tokens}
    return question | (
        {"rule": job.sampling.grammar.seed} if isinstance(job.sampling.grammar, RuleGrammar) else {}
    )


def _difference(job: Job, expected: Sequence[int], said: Sequence[int]) -> Difference | None:
    """Return the first difference. A cancelled row's answer is shorter, and only that part is compared."""
    for index, (ours, theirs) in enumerate(zip(said, expected, strict=False)):
        if ours != theirs:
            return Difference(job, index, tuple(expected), tuple(said))
    return None


def gap(architecture: str, found: Difference) -> float:
    """Return the gap where a row diverged. Greedy: between upstream's logits of the two tokens. Sampled
    without penalties: between the draw and another token, or, if ranked, between the two tokens."""
    import mlx.core as mx

    tokens = mx.array([[*found.job.prompt, *found.expected[: found.index]]])
    logits = _logits(architecture, tokens)
    if _is_greedy(found.job):
        return abs(float(logits[found.expected[found.index]] - logits[found.said[found.index]]))
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)
    if isinstance(found.job.sampling.grammar, RuleGrammar):
        rule = allows(found.job.sampling.grammar.seed, found.expected[: found.index])
        exact[~_allowed(rule, len(exact))] = -np.inf
    apart = distance(exact, found.job.sampling, tokens.shape[1])
    if not found.job.sampling.top_k:
        return apart
    # Tokens are ranked before one is drawn: two equally likely ones may swap places.
    ours, theirs = exact[found.said[found.index]], exact[found.expected[found.index]]
    return min(apart, float(abs(ours - theirs)))


def _logits(architecture: str, tokens: Any) -> Any:
    """Return upstream's logits of the next token, in one pass."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    from mlx_vlm.models.cache import make_prompt_cache as whole_cache

    folder = _folder(architecture)
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


Check = Callable[[Model, str, int, Oracle], Iterable[str]]
"""Plays one seed on an architecture's model, and returns what is wrong."""


def main(description: str, check: Check, settings: Sequence[Mapping[str, Any]] = ({},)) -> int:
    """Run a check on the architectures of the command line, with each of `settings`, which are arguments of
    `load`. Return 1 if anything is wrong."""
    preload_openblas(sys.argv)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--architecture", action="append", choices=(*ARCHITECTURES, TALKING))
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    faults = 0
    with Oracle() as oracle:
        for architecture in arguments.architecture or ARCHITECTURES:
            count = 0
            for setting in settings:
                try:
                    model = load(architecture, **setting)
                except ModelError as error:
                    print(f"{architecture} {setting}: refused: {error}", flush=True)
                    continue
                for seed in seeds:
                    for wrong in check(model, architecture, seed, oracle):
                        count += 1
                        print(f"{architecture} {setting} seed {seed}: {wrong}", flush=True)
            faults += count
            print(f"{architecture}: {len(seeds)} seeds, {count} wrong", flush=True)
    return 1 if faults else 0


def _check(model: Model, architecture: str, seed: int, oracle: Oracle) -> Iterator[str]:
    """Yield the rows that differ where rounding is not the cause, and print the others."""
    talks = architecture == TALKING
    rows = TALKING_ROWS if talks else ROWS
    for found in differences(model, architecture, seed, oracle, rows, drafted=talks):
        is_penalized = found.job.sampling.repetition_penalty != 1
        apart = 0.0 if is_penalized else gap(architecture, found)
        told = "penalized" if is_penalized else f"gap {apart:.2g}"
        line = f"{found.job.name}, token {found.index}, {told}"
        if apart > TIE:
            yield line
        else:
            print(f"{architecture} seed {seed}: {line}")


if __name__ == "__main__":
    raise SystemExit(main("Random lives of rows, held against upstream alone.", _check))
