"""Our server over HTTP next to `mlx_lm.server`, `mlx_vlm.server` and our own engine in process.

    python -m bench.serve [--models dense,hybrid] [--concurrency 1,4,16] [--rounds 5] [--rivals ...]

Real processes on loopback, with the same model folder and BLAS; streaming, greedy, about 126 prompt and 64
output tokens. The sides take turns within each round; no two requests share a prompt. `seeded`: each request
has a `seed`, which makes `mlx_lm.server` answer one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.client import Answer, burst
from bench.inprocess import InProcess, in_process
from bench.models import bench_folder, random_text
from bench.rivals import NAMES, Server, servers
from bench.timing import Work, alternate, compare, median_rate, print_table

OURS, IN_PROCESS = "roundhouse", "in process"
TEXT_TOKENS = 116
"""126 together with the tokens of the template."""
MAX_TOKENS = 64
SEEDED_CONCURRENCY = 16


@dataclass(frozen=True)
class Case:
    """`concurrency` clients at once, each sending one request after another."""

    concurrency: int
    seed: int | None = None

    @property
    def requests(self) -> int:
        return max(4, 2 * self.concurrency)

    def __str__(self) -> str:
        return f"{self.concurrency} at once" + (", seeded" if self.seed is not None else "")


@dataclass
class Result:
    """Results of a case. `answers`: of each server, round by round, warm-up included."""

    case: Case
    done: dict[str, list[Work]] = field(default_factory=dict)
    answers: dict[str, list[list[Answer]]] = field(default_factory=dict)

    def first_piece_ms(self, name: str) -> float:
        measured = [answer for answers in self.answers[name][1:] for answer in answers]
        return 1000 * statistics.median(answer.first_s for answer in measured)


def _texts(folder: Path, case: Case, first: int) -> Iterator[list[str]]:
    """Yield the prompts of each round: the same for every side, new in every round and case."""
    for seed in itertools.count(first, case.requests):
        yield [random_text(folder, TEXT_TOKENS, seed + number) for number in range(case.requests)]


def _measure_server(server: Server, result: Result, texts: Iterator[list[str]]) -> Work:
    case = result.case
    fields = {} if case.seed is None else {"seed": case.seed}
    work, answers = asyncio.run(burst(server, next(texts), case.concurrency, MAX_TOKENS, **fields))
    result.answers.setdefault(server.name, []).append(answers)
    return work


def _measure_in_process(engine: InProcess, case: Case, texts: Iterator[list[str]]) -> Work:
    return engine.burst(next(texts), case.concurrency, MAX_TOKENS, case.seed)


def measure(
    folder: Path, case: Case, up: Sequence[Server], engine: InProcess, rounds: int, first: int
) -> Result:
    """Measure one case, all sides in turns. `first`: the seed of the first prompt."""
    result = Result(case)
    sides: dict[str, Callable[[], Work]] = {
        server.name: partial(_measure_server, server, result, _texts(folder, case, first)) for server in up
    }
    sides[IN_PROCESS] = partial(_measure_in_process, engine, case, _texts(folder, case, first))
    result.done = alternate(sides, rounds)
    return result


def report(model: str, results: Sequence[Result], rounds: int) -> None:
    """Print one table for one model, with a row for each case and side."""
    lines = []
    for result in results:
        for side, done in result.done.items():
            case = str(result.case) if side == OURS else ""
            ratio = "" if side == OURS else str(compare(result.done[OURS], done))
            wait = f"{result.first_piece_ms(side):,.0f}" if side in result.answers else ""
            lines.append([case, side, f"{median_rate(done):,.0f}", ratio, wait])
    asked = {
        name: [answer for each in results for answers in each.answers[name] for answer in answers]
        for name in results[0].answers
    }
    prompt = statistics.median(answer.prompt_tokens for answer in asked[OURS])
    print_table(
        f"Over HTTP, {model}: {prompt:.0f} prompt and {MAX_TOKENS} output tokens",
        [model, "", "tokens/s", "ours over it", "first text, ms"],
        lines,
        f"Columns: output tokens/s, median of {rounds} rounds; the ratio of ours to it, median of the ratios "
        "of the rounds (smallest-largest); milliseconds to the first text (median). Aims: 0.97 of in "
        "process, 1.05 of mlx_lm.server, and twice that server when seeded.",
    )
    for name, answers in asked.items():
        tokens = sorted({answer.tokens for answer in answers})
        resets = sum(answer.resets for answer in answers)
        print(f"{name}: answers of {tokens} tokens, {resets} connections reset and opened again")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="dense,hybrid")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", default=",".join(name for name in NAMES if name != OURS))
    options = parser.parse_args()
    cases = [Case(int(count)) for count in options.concurrency.split(",")] + [Case(SEEDED_CONCURRENCY, 7)]
    rows_max = max(case.concurrency for case in cases)
    names = [OURS, *options.rivals.split(",")]
    for model in options.models.split(","):
        folder = bench_folder(model)
        with servers(folder, rows_max, names) as up, in_process(folder) as engine:
            results = [
                measure(folder, case, up, engine, options.rounds, 10_000 * number)
                for number, case in enumerate(cases)
            ]
        report(model, results, options.rounds)


if __name__ == "__main__":
    main()
