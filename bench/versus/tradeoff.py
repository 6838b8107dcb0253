"""Throughput and first text over the gaps of streams: ours at five settings of chunked prefill, and others.

Chats of 40 to 800 tokens arrive as fast as others end, so prompts are prefilled beside streams all the
time. One server runs at a time; each round starts each anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.rivals import server
from bench.versus.chats import measure_burst, prompts
from bench.versus.results import OURS, Entry
from bench.versus.turns import Figure, Task, Values, entries, take_turns, within

LINE = "tradeoff"
AT = 8
REQUESTS = 16
MAX_TOKENS = 48
WORDS = 15, 450
SETTINGS = {
    f"{OURS} 50 ms": {"target": "0.05", "max": "0.2"},
    f"{OURS} 200 ms": {"target": "0.2", "max": "0.5"},
    f"{OURS} 500 ms": {"target": "0.5", "max": "1"},
    f"{OURS} 2 s": {"target": "2", "max": "2"},
}
"""Our settings beside the defaults: `--inter-token-target` and `--inter-token-max`, by the side's name."""
FIGURES = (
    Figure("rate", "tokens/s", "", "more", AT),
    Figure("first", "first text, median", "ms", "less", AT),
    Figure("gap99", "gap between pieces, p99", "ms", "less", AT),
)


def measure(task: Task) -> Iterator[list[Entry]]:
    """Measure the line: the named servers, and ours at each of `SETTINGS`."""
    turns = {name: partial(_turn, name, task.folder) for name in (*task.names, *SETTINGS)}
    yield entries(task.model, LINE, FIGURES, take_turns(turns, task.rounds, warm=False), task.run)


def _turn(name: str, folder: Path, round: int) -> Values:
    setting, started_as = SETTINGS.get(name, {}), OURS if name in SETTINGS else name
    environ = {f"ROUNDHOUSE_INTER_TOKEN_{key.upper()}": value for key, value in setting.items()}
    with server(started_as, folder, AT, environ=environ) as started:
        within(measure_burst(started, prompts(AT, 500 * round, *WORDS), AT, 4))  # costs are learned
        return within(measure_burst(started, prompts(REQUESTS, 3000 + 50 * round, *WORDS), AT, MAX_TOKENS))
