"""What a long prompt costs others, and itself, where only a part of it is run.

    python -m bench.parts [--gaps 8000] [--rounds 1] [--first 4000,8000,16000] [--weighed 16000] [--keep 0.3]

Gaps: between the pieces of four running streams, over HTTP, while a long prompt comes, which is run whole and
in part; then one is given up while the small model reads it, and how long it is still known of is told.
First: CPU seconds until the first token of a larger random model, the small one's part included.
Weighed: what weighing takes when the prompt has been read: its parts, and the bytes beside the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from bench.client import Answer, ask, client
from bench.gaps import CALM_PIECES, STREAM_TOKENS, STREAMS, TEXT_TOKENS, gaps
from bench.models import bench_folder, random_text, random_tokens
from bench.processes import free_port, socket_folder, wait_for
from bench.rivals import Server, Start, command_of, started
from bench.timing import percentile, print_table

SERVED, LARGE, SMALL = "dense", "dense-1024", "dense-small"
CHUNK = 512
GIVEN_UP_S = 2.0
"""After it was sent."""
KNOWN_S_MAX = 30.0
_POLL_S = 0.02


@dataclass
class Watched:
    """Of all rounds, in seconds."""

    calm: list[float] = field(default_factory=list)
    troubled: list[float] = field(default_factory=list)
    first_piece: list[float] = field(default_factory=list)


@contextlib.contextmanager
def served() -> Iterator[Server]:
    """Ours, with a small model that weighs."""
    with socket_folder() as own:
        start = Start(bench_folder(SERVED), free_port(), STREAMS + 1, False, own)
        command = command_of("roundhouse", start)
        small = ["--draft-model", str(bench_folder(SMALL))]
        command = replace(command, arguments=[*command.arguments, *small])
        with started(command, own / "log") as process:
            url = f"http://127.0.0.1:{start.port}"
            wait_for(url + command.ready, process)
            yield Server("roundhouse", url, process, command.fields | {"speculation": False})


async def streams_beside(server: Server, prompt: str, watched: Watched, **fields: Any) -> None:
    """One round: the long prompt comes when all streams are under way."""
    async with client(server) as http, asyncio.TaskGroup() as group:
        streams = await _streams(http, server, group)
        long = await ask(http, server, prompt, 2, **fields)
        for stream in group_of(streams):
            stream.cancel()
    asked, answered = long.sent_at, long.pieces[0]
    watched.first_piece.append(long.first_piece_s)
    joined = max(answer.pieces[CALM_PIECES // 2] for answer, _ in streams)
    for answer, _ in streams:
        watched.calm += gaps([at for at in answer.pieces if at <= asked], joined, asked)
        watched.troubled += gaps(answer.pieces, asked, answered)


def group_of(streams: Sequence[tuple[Answer, asyncio.Task[Answer]]]) -> list[asyncio.Task[Answer]]:
    """Those that are still under way."""
    return [task for _, task in streams if not task.done()]


async def _streams(
    http: httpx.AsyncClient, server: Server, group: asyncio.TaskGroup
) -> list[tuple[Answer, asyncio.Task[Answer]]]:
    found = []
    for number in range(STREAMS):
        answer = Answer(underway_pieces=CALM_PIECES)
        text = random_text(bench_folder(SERVED), TEXT_TOKENS, number)
        found.append((answer, group.create_task(ask(http, server, text, 2 * STREAM_TOKENS, answer))))
    for answer, _ in found:
        await answer.underway.wait()
    return found


async def given_up(server: Server, prompt: str, **fields: Any) -> float:
    """Seconds for which a prompt is known of after its client has gone, while the small model reads it."""
    async with client(server) as http:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask(http, server, prompt, 2, **fields), GIVEN_UP_S)
        began = time.perf_counter()
        while await _rows(http):
            if time.perf_counter() - began > KNOWN_S_MAX:
                return KNOWN_S_MAX
            await asyncio.sleep(_POLL_S)
        return time.perf_counter() - began


async def _rows(http: httpx.AsyncClient) -> int:
    """What the worker has told of, which it does four times a second."""
    status = (await http.get("/v1/status")).json()
    return sum(model["running"] + model["waiting"] for model in status["models"])


def gaps_of(tokens: int, rounds: int, keep: float) -> None:
    wishes: dict[str, Any] = {"whole": False, "in part": {"keep": keep, "above": 1000}}
    results = {name: Watched() for name in wishes}
    folder = bench_folder(SERVED)
    with served() as server:
        for wish in wishes.values():
            asyncio.run(streams_beside(server, random_text(folder, 1500, 99), Watched(), sparse_prefill=wish))
        for number in range(rounds):
            for name, wish in wishes.items():
                prompt = random_text(folder, tokens, 1000 + number)
                asyncio.run(streams_beside(server, prompt, results[name], sparse_prefill=wish))
        known = asyncio.run(
            given_up(server, random_text(folder, 2 * tokens, 7), sparse_prefill=wishes["in part"])
        )
    rows = []
    for name, watched in results.items():
        spread = [
            *(percentile(watched.calm, percent) for percent in (50, 99)),
            *(percentile(watched.troubled, percent) for percent in (50, 99)),
            max(watched.troubled),
            statistics.median(watched.first_piece),
        ]
        rows.append([name, *(f"{1000 * figure:,.0f}" for figure in spread)])
    columns = ["ms", "calm p50", "calm p99", "p50", "p99", "max", "first text"]
    legend = f"One that is given up after {GIVEN_UP_S:.0f} s is known of for {known:.2f} s more."
    print_table(f"Gaps of {STREAMS} streams beside {tokens:,} tokens, {keep:.0%} run", columns, rows, legend)


def first_tokens(lengths: Sequence[int], rounds: int, keep: float) -> None:
    from mlx_lm.utils import load_model

    large, small = (load_model(bench_folder(name))[0] for name in (LARGE, SMALL))
    rows = []
    for tokens in lengths:
        found = [_first_token(large, small, random_tokens(tokens, seed), keep) for seed in range(rounds)]
        whole, weighed, part = (statistics.median(each[at] for each in found) for at in range(3))
        ratio = statistics.median(whole / (weighed + part) for whole, weighed, part in found)
        figures = [f"{seconds:.1f}" for seconds in (whole, weighed + part, weighed)]
        rows.append([f"{tokens:,}", *figures, f"{ratio:.2f}"])
    headings = ["tokens", "whole, CPU s", "in part, CPU s", "of it the small model's", "times sooner"]
    print_table(f"The first token of {LARGE} beside {SMALL}", headings, rows, f"{keep:.0%} run.")


def _first_token(large: Any, small: Any, prompt: list[int], keep: float) -> tuple[float, float, float]:
    """CPU seconds: of the whole prompt, of weighing it, of the part."""
    from bench.sparse import Side
    from worker.engine.weighing import weigh
    from worker.schedule.sparse import least

    moments = [time.process_time()]
    whole = Side(large)
    whole.read(prompt[:-1])
    whole.say(prompt[-1], 1)
    moments.append(time.process_time())
    reader = Side(small)
    reader.read(prompt[:-1])
    weights: Any = weigh(small, reader.caches, prompt[-1]).tolist()
    moments.append(time.process_time())
    part = Side(large)
    part.read(prompt[:-1], least(weights, keep, 0))
    part.say(prompt[-1], 1)
    moments.append(time.process_time())
    first, second, third = (after - before for before, after in itertools.pairwise(moments))
    return first, second, third


def weighed(tokens: int) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from bench.sparse import Side
    from worker.engine.trees import held_bytes
    from worker.engine.weighing import weighing

    network = load_model(bench_folder(SMALL))[0]
    side, prompt = Side(network), random_tokens(tokens, 0)
    side.read(prompt[:-1])
    held = sum(held_bytes(cache) for cache in side.caches)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    parts, began = [], time.process_time()
    for weights in weighing(network, side.caches, prompt[-1]):
        if weights is not None:
            mx.eval(weights)
        parts.append(time.process_time() - began)
        began = time.process_time()
    beside = mx.get_peak_memory() - before
    figures = [f"{held / 1e6:.0f}", f"{beside / held:.2f}", str(len(parts)), f"{sum(parts):.2f}"]
    headings = ["caches, MB", "beside them, times", "parts", "CPU s", "the longest"]
    print_table(f"Weighing {tokens:,} tokens", headings, [[*figures, f"{max(parts):.2f}"]], f"By {SMALL}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gaps", type=int, default=8000, help="tokens of the long prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--first", default="4000,8000,16000", help="lengths of prompts; empty: none")
    parser.add_argument("--weighed", type=int, default=16000, help="tokens; 0: none")
    parser.add_argument("--keep", type=float, default=0.3)
    asked = parser.parse_args()
    if asked.gaps:
        gaps_of(asked.gaps, asked.rounds, asked.keep)
    if asked.weighed:
        weighed(asked.weighed)
    if asked.first:
        first_tokens([int(tokens) for tokens in asked.first.split(",")], asked.rounds, asked.keep)


if __name__ == "__main__":
    main()
