"""Effect of a long prompt on four running streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.gaps import STREAMS, WARM_UP, Plan, Watched, watch
from bench.rivals import Server
from bench.versus.fleet import fleet
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, within
from deploy.load.samples import percentile

LINE = "gaps"
PROMPT_TOKENS = 4000
PLAN = Plan(PROMPT_TOKENS, stream_tokens=400)
_BESIDE = f"beside a prompt of {PROMPT_TOKENS:,} tokens"
FIGURES = [
    Figure("calm", f"gap of {STREAMS} streams, calm, p99", "ms", "less"),
    Figure("p99", f"gap of {STREAMS} streams {_BESIDE}, p99", "ms", "less"),
    Figure("most", f"gap of {STREAMS} streams {_BESIDE}, longest", "ms", "less"),
    Figure("first", "first text of that prompt", "ms", "less"),
]


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line on one model."""
    with fleet(task.folder, task.names, STREAMS + 1) as up:

        def turn(server: Server, round: int) -> Values:
            return within(_watch(server, task.folder, round))

        yield entries(task.model, LINE, FIGURES, up.take_turns(turn, task.rounds), task.run)


async def _watch(server: Server, folder: Path, round: int) -> dict[str, float]:
    watched = Watched()
    await watch(server, folder, PLAN if round else WARM_UP, 1000 * round, watched)
    if watched.outlived:
        raise RuntimeError(f"{watched.outlived} of {STREAMS} streams ended before the prefill did")
    return {
        "calm": 1000 * percentile(watched.calm, 99),
        "p99": 1000 * percentile(watched.troubled, 99),
        "most": 1000 * max(watched.troubled),
        "first": 1000 * watched.first_piece[0],
    }
