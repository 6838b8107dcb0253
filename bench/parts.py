"""Cost of a long prompt under sparse prefill, for other requests and for itself.

    python -m bench.parts [--gaps 8000] [--rounds 1] [--first 4000,8000,16000] [--model dense-1024]
        [--laps 8000] [--weighed 16000] [--keep 0.3]

Gaps: between the pieces of four running streams, over HTTP, while a long prompt arrives, prefilled whole and
in part; then a request is cancelled while the small model reads its prompt, and the time until the worker has
dropped it is measured. Laps: the same in process, in CPU seconds, so that other load does not count. First:
time to first token of a larger random model, including the small model's scoring. Weighed: cost of scoring
after the prompt has been read: its slices, and the memory beside the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import queue
import statistics
import sys
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
from bench.timing import print_table
from deploy.load.samples import percentile
from protocol.messages import Message, StepOutputs
from protocol.types import SparsePrefill
from protocol.worker_settings import WorkerSettings
from worker.contract.engine import EngineRequest, SamplingParams
from worker.preload import GUARD, preload_openblas
from worker.schedule.commands import Abort, Command, Stop, Submit
from worker.schedule.loop import Loop
from worker.schedule.publisher import Publisher
from worker.schedule.scheduler import Scheduler, SchedulerConfig
from worker.schedule.sparse_prefill import SparsePrefillQueue

SERVED, SMALL = "dense", "dense-small"
CHUNK = 512
GIVEN_UP_S = 2.0
"""Seconds from sending to cancelling."""
KNOWN_S_MAX = 30.0
_POLL_S = 0.02


@dataclass
class Watched:
    """Times of all rounds, in seconds."""

    calm: list[float] = field(default_factory=list)
    troubled: list[float] = field(default_factory=list)
    first_piece: list[float] = field(default_factory=list)


@contextlib.contextmanager
def served() -> Iterator[Server]:
    """Run our server with a small model that scores tokens."""
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
    """Run one round: the long prompt is sent when all streams are running."""
    async with client(server) as http, asyncio.TaskGroup() as group:
        streams = await _streams(http, server, group)
        long = await ask(http, server, prompt, 2, **fields)
        for stream in group_of(streams):
            stream.cancel()
    asked, answered = long.sent_at, long.pieces[0]
    watched.first_piece.append(long.first_s)
    joined = max(answer.pieces[CALM_PIECES // 2] for answer, _ in streams)
    for answer, _ in streams:
        watched.calm += gaps([at for at in answer.pieces if at <= asked], joined, asked)
        watched.troubled += gaps(answer.pieces, asked, answered)


def group_of(streams: Sequence[tuple[Answer, asyncio.Task[Answer]]]) -> list[asyncio.Task[Answer]]:
    """Return the tasks of the streams that are still running."""
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
    """Return the seconds for which a cancelled request stays at the worker while the small model reads its
    prompt."""
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
    """Return the requests that the worker has reported, which it does four times a second."""
    status = (await http.get("/v1/status")).json()
    return sum(worker["running"] + worker["waiting"] for worker in status["workers"])


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
    legend = f"A request that is cancelled after {GIVEN_UP_S:.0f} s stays at the worker {known:.2f} s more."
    print_table(f"Gaps of {STREAMS} streams beside {tokens:,} tokens, {keep:.0%} kept", columns, rows, legend)


class Laps:
    """The worker's loop with a clock of CPU seconds; records when each row's tokens arrive."""

    def __init__(self, target_s: float) -> None:
        from bench.ours import BYTES_MAX, load

        model = load(bench_folder(SERVED), bench_folder(SMALL))
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.came: dict[str, list[float]] = {}
        self._awaited: tuple[str, int] = "", 0
        policy = SchedulerConfig(rows_max=STREAMS + 1, bytes_max=BYTES_MAX, row_bytes=model.engine.row_bytes)
        self._loop = Loop(
            model=model,
            scheduler=Scheduler(policy),
            inbox=self._inbox,
            publisher=Publisher("bench", self._publish, lambda: 0),
            sparse_prefill=SparsePrefillQueue(
                model.engine.importance_scorer, is_able=True, target_s=target_s
            ),
            clock=time.process_time,
        )

    def submit(self, id: str, tokens: Sequence[int], max_tokens: int, keep: float = 1.0) -> None:
        """Submit a request of whose prompt the share `keep` is to be prefilled."""
        wish = SparsePrefill(keep=keep, above=1000)
        asked = EngineRequest(
            id, tuple(tokens), SamplingParams(), (), max_tokens, frozenset(), sparse=wish, speculation=False
        )
        self.came[id] = []
        self._inbox.put(Submit(asked))

    def run(self, id: str, pieces: int) -> None:
        """Run until `pieces` tokens of a row have arrived."""
        self._awaited = id, pieces
        self._loop.run()

    def drop(self) -> None:
        """Drop all rows."""
        for row in self._loop.scheduler:
            self._inbox.put(Abort(row.id))

    def _publish(self, message: Message) -> None:
        if not isinstance(message, StepOutputs):
            return
        for delta in message.deltas:
            self.came[delta.id].append(time.process_time())
        id, pieces = self._awaited
        if len(self.came[id]) >= pieces:
            self._awaited = id, len(self.came[id]) + 10**6
            self._inbox.put(Stop())


def laps_of(tokens: int, rounds: int, keep: float) -> None:
    timer, rows = Laps(WorkerSettings().inter_token_target_s), []
    for name, kept in (("whole", 1.0), ("in part", keep)):
        calm: list[float] = []
        troubled: list[float] = []
        first: list[float] = []
        for number in range(rounds + 1):
            for stream in range(STREAMS):
                timer.submit(f"{number}-{stream}", random_tokens(TEXT_TOKENS, stream), 4 * STREAM_TOKENS)
            timer.run(f"{number}-{STREAMS - 1}", CALM_PIECES)
            asked = time.process_time()
            # The first round is a warm-up.
            timer.submit(f"{number}-long", random_tokens(tokens if number else 1500, number), 1, kept)
            timer.run(f"{number}-long", 1)
            answered = timer.came[f"{number}-long"][0]
            for stream in range(STREAMS) if number else ():
                came = timer.came[f"{number}-{stream}"]
                calm += gaps(came, came[CALM_PIECES // 2], asked)
                troubled += gaps(came, asked, answered)
            first += [answered - asked] * bool(number)
            timer.drop()
        spread = [percentile(calm, 50), *(percentile(troubled, at) for at in (50, 99)), max(troubled)]
        spread.append(statistics.median(first))
        rows.append([name, *(f"{1000 * figure:,.0f}" for figure in spread)])
    columns = ["CPU ms", "calm p50", "p50", "p99", "max", "first token"]
    print_table(f"Laps of {STREAMS} streams beside {tokens:,} tokens, {keep:.0%} kept", columns, rows, "")


def first_tokens(name: str, lengths: Sequence[int], rounds: int, keep: float) -> None:
    from mlx_lm.utils import load_model

    large, small = (load_model(bench_folder(each))[0] for each in (name, SMALL))
    _first_token(large, small, random_tokens(CHUNK, 99), keep)
    rows = []
    for tokens in lengths:
        found = [_first_token(large, small, random_tokens(tokens, seed), keep) for seed in range(rounds)]
        rows.append([f"{tokens:,}"])
        for clock in range(2):
            taken = [each[clock] for each in found]
            whole, weighed, part = (statistics.median(each[at] for each in taken) for at in range(3))
            ratio = statistics.median(whole / (weighed + part) for whole, weighed, part in taken)
            rows[-1] += [*(f"{figure:.1f}" for figure in (whole, weighed + part, weighed)), f"{ratio:.2f}"]
        print(*rows[-1], flush=True)
    headings = ["tokens", "whole, s", "in part", "of it scoring", "speed-up"]
    headings += ["CPU s: whole", "in part", "scoring", "speed-up"]
    print_table(f"The first token of {name} beside {SMALL}", headings, rows, f"{keep:.0%} kept.")


def _first_token(large: Any, small: Any, prompt: list[int], keep: float) -> list[list[float]]:
    """Return wall-clock and CPU seconds of the whole prompt, of scoring it, and of the kept part."""
    from bench.sparse import Side
    from worker.engine.token_importance import score_tokens
    from worker.schedule.sparse_prefill import least

    moments = [_now()]
    whole = Side(large)
    whole.read(prompt[:-1])
    whole.say(prompt[-1], 1)
    moments.append(_now())
    reader = Side(small)
    reader.read(prompt[:-1])
    weights: Any = score_tokens(small, reader.caches, prompt[-1]).tolist()
    moments.append(_now())
    part = Side(large)
    part.read(prompt[:-1], least(weights, keep, 0))
    part.say(prompt[-1], 1)
    moments.append(_now())
    clocks = zip(*moments, strict=True)
    return [[after - before for before, after in itertools.pairwise(clock)] for clock in clocks]


def _now() -> tuple[float, float]:
    """Return the wall-clock and the CPU time in seconds."""
    return time.perf_counter(), time.process_time()


def weighed(tokens: int) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    from bench.sparse import Side
    from worker.engine.token_importance import score_tokens_in_parts
    from worker.engine.trees import held_bytes

    network = load_model(bench_folder(SMALL))[0]
    side, prompt = Side(network), random_tokens(tokens, 0)
    side.read(prompt[:-1])
    held = sum(held_bytes(cache) for cache in side.caches)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    parts, began = [], time.process_time()
    for weights in score_tokens_in_parts(network, side.caches, prompt[-1]):
        if weights is not None:
            mx.eval(weights)
        parts.append(time.process_time() - began)
        began = time.process_time()
    beside = mx.get_peak_memory() - before
    figures = [f"{held / 1e6:.0f}", f"{beside / held:.2f}", str(len(parts)), f"{sum(parts):.2f}"]
    headings = ["caches, MB", "extra memory over caches", "slices", "CPU s", "longest slice, s"]
    print_table(f"Scoring {tokens:,} tokens", headings, [[*figures, f"{max(parts):.2f}"]], f"By {SMALL}.")


def main() -> None:
    preload_openblas(sys.argv)
    os.environ.pop(GUARD, None)  # a server that is started here finds its own
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gaps", type=int, default=8000, help="tokens of the long prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--first", default="4000,8000,16000", help="lengths of prompts; empty: none")
    parser.add_argument("--model", default="dense-1024", help="larger model of the first-token measurement")
    parser.add_argument("--laps", type=int, default=8000, help="tokens of the long prompt; 0: none")
    parser.add_argument("--weighed", type=int, default=16000, help="tokens; 0: none")
    parser.add_argument("--keep", type=float, default=0.3)
    asked = parser.parse_args()
    if asked.gaps:
        gaps_of(asked.gaps, asked.rounds, asked.keep)
    if asked.timer:
        laps_of(asked.timer, asked.rounds, asked.keep)
    if asked.weighed:
        weighed(asked.weighed)
    if asked.first:
        first_tokens(
            asked.model, [int(tokens) for tokens in asked.first.split(",")], asked.rounds, asked.keep
        )


if __name__ == "__main__":
    main()
