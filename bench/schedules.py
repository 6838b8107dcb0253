"""Simulated schedules: what a prefill policy does to first texts, completion times and gaps, without a model.

    python -m bench.schedules [--targets 0.1,0.3,1] [--gaps 0.5,1] [--machines large,…] [--rows 16] [--cold]

The scheduler is the worker's own; the engine is a cost model with noise: a decode step costs `decode` seconds
and `row` more for each row, a prefill call costs `call`, and `token` for each token. Times are simulated, so
the load of this machine does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.factories import engine_request
from worker.core.rows import Group, Row
from worker.core.scheduler import Scheduler, SchedulerConfig

ROWS_MAX = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """A cost model, in seconds."""

    name: str
    decode: float
    row: float
    call: float
    token: float
    reach: float = 0.0

    def decode_s(self, rows: int) -> float:
        return self.decode + self.row * rows

    def prefill_s(self, width: int, context: int = 0, rows: int = 1) -> float:
        """Return the seconds of a call with `width` tokens per row."""
        return self.call + rows * width * (self.token + self.reach * (context + width / 2))


MACHINES = (
    Machine("tiny", decode=0.003, row=0.00015, call=0.001, token=0.00005, reach=2e-8),
    Machine("smollm2", decode=0.048, row=0.006, call=0.062, token=0.0029, reach=2e-7),
    Machine("large", decode=0.045, row=0.002, call=0.02, token=0.0015, reach=1e-7),
    Machine("small", decode=0.008, row=0.0006, call=0.003, token=0.0003, reach=2e-8),
    Machine("slow", decode=0.2, row=0.004, call=0.05, token=0.005, reach=3e-7),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it arrives, the tokens of its prompt and of its answer."""

    at: float
    prompt: int
    answer: int


Scenario = Callable[[Machine, random.Random], list[Arrival]]


def burst(count: int, prompt: tuple[int, int], answer: int, within_s: float = 0.0) -> Scenario:
    """Return requests that arrive together, or evenly spread over `within_s` seconds."""

    def arrivals(machine: Machine, chance: random.Random) -> list[Arrival]:
        return [
            Arrival(within_s * number / count, chance.randint(*prompt), answer) for number in range(count)
        ]

    return arrivals


def beside(streams: int, prompt: int) -> Scenario:
    """Return streams beside which a long prompt arrives."""

    def arrivals(machine: Machine, chance: random.Random) -> list[Arrival]:
        began = 10 * machine.decode_s(streams) + streams * machine.prefill_s(50)
        return [*(Arrival(0.0, 50, 400) for _ in range(streams)), Arrival(began, prompt, 40)]

    return arrivals


def poisson(share: float, count: int = 80) -> Scenario:
    """Return arrivals at a share of the machine's capacity, of chats with 20 to 600 prompt tokens."""

    def arrivals(machine: Machine, chance: random.Random) -> list[Arrival]:
        prompts = [round(20 * 30 ** chance.random()) for _ in range(count)]
        answers = [chance.randint(20, 120) for _ in range(count)]
        work = sum(
            machine.prefill_s(prompt) + answer * machine.decode_s(ROWS_MAX) / ROWS_MAX
            for prompt, answer in zip(prompts, answers, strict=True)
        )
        at, found = 0.0, []
        for prompt, answer in zip(prompts, answers, strict=True):
            at += chance.expovariate(share * count / work)
            found.append(Arrival(at, prompt, answer))
        return found

    return arrivals


def agents(count: int, turns: int) -> Scenario:
    """Return agents' turns: a prompt of 300 to 1,500 new tokens, an answer of 80, a pause for a tool."""

    def arrivals(machine: Machine, chance: random.Random) -> list[Arrival]:
        turn_s = machine.prefill_s(900) * 4 + 80 * machine.decode_s(count)
        return [
            Arrival(turn * turn_s + chance.uniform(0, turn_s), chance.randint(300, 1500), 80)
            for _ in range(count)
            for turn in range(turns)
        ]

    return arrivals


SCENARIOS: dict[str, Scenario] = {
    "4 chats": burst(4, (40, 700), 64),
    "16 chats": burst(16, (40, 700), 64),
    "16 short": burst(16, (40, 60), 40),
    "64 short": burst(64, (40, 60), 40),
    "64 in 0.6 s": burst(64, (40, 60), 40, within_s=0.6),
    "48 chats": burst(48, (40, 700), 64, within_s=0.4),
    "16 long": burst(16, (400, 1000), 64),
    "4+4000": beside(4, 4000),
    "agents": agents(4, 4),
    "poisson .5": poisson(0.5),
    "poisson .9": poisson(0.9),
}


@dataclass
class Stream:
    arrival: Arrival
    times: list[float] = field(default_factory=list)


@dataclass
class Simulation:
    """One scenario on one machine, with the worker's own scheduler."""

    machine: Machine
    config: SchedulerConfig
    seed: int
    cold: bool = False
    """Whether nothing has been measured yet."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.scheduler = Scheduler(self.config)
        self.streams: dict[str, Stream] = {}

    def noise(self) -> float:
        return self.random.lognormvariate(0, 0.05)

    def run(self, arrivals: Sequence[Arrival]) -> list[Stream]:
        """Run a warm-up, in which costs are measured, and then the arrivals."""
        for count in () if self.cold else (1, 3, 8):
            self._drain([Arrival(self.now, 100, 6) for _ in range(count)])
        began, self.streams = self.now, {}
        self._drain([Arrival(began + each.at, each.prompt, each.answer) for each in arrivals])
        return list(self.streams.values())

    def _drain(self, arrivals: Iterable[Arrival]) -> None:
        coming = sorted(arrivals, key=lambda each: each.at)
        while coming or len(self.scheduler):
            if not len(self.scheduler):
                self.now = max(self.now, coming[0].at)
            while coming and coming[0].at <= self.now:
                self._add(coming.pop(0))
            self._step()

    def _add(self, arrival: Arrival) -> None:
        id = f"r{len(self.streams)}-{arrival.at}"
        tokens = (self.random.getrandbits(40), *range(1, arrival.prompt))
        self.streams[id] = Stream(arrival)
        self.scheduler.add(engine_request(id, tokens, max_tokens=arrival.answer), self.now)

    def _step(self) -> None:
        if decodes := self.scheduler.decodes:
            self._decode()
        else:
            self.scheduler.on_step_end(self.now, decoded=None)
        for group in self.scheduler.plan().groups:
            self._prefill(group)
        if not decodes:
            self.scheduler.on_step_end(self.now, decoded=False)

    def _decode(self) -> None:
        rows = self.scheduler.decoding
        self.now += self.machine.decode_s(len(rows)) * self.noise()
        self.scheduler.on_step_end(self.now, decoded=True)
        for row in rows:
            self._emit(row)

    def _emit(self, row: Row) -> None:
        self.streams[row.id].times.append(self.now)
        self.scheduler.answered(row, 7)
        if len(row.answered) >= row.request.max_tokens:
            self.scheduler.drop(row.id)

    def _prefill(self, group: Group) -> None:
        if width := max(len(chunk.tokens) for chunk in group):
            self.now += self.machine.prefill_s(width, group[0].begin, len(group)) * self.noise()
        self.scheduler.ran(group)
        for chunk in group:
            if chunk.last:
                for row in (*chunk.copies, chunk.row):
                    self.scheduler.started(row, sampled=1)
                    self._emit(row)


@dataclass(frozen=True, slots=True)
class Figures:
    """What clients notice. Seconds; `speed` in tokens per second."""

    speed: float
    first_mean: float
    first_last: float
    done_mean: float
    gap_p99: float
    gap_max: float
    second_max: float

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Figures:
        first = [each.times[0] - each.arrival.at for each in streams]
        done = [each.times[-1] - each.arrival.at for each in streams]
        gaps = sorted(b - a for each in streams for a, b in zip(each.times, each.times[1:], strict=False))
        began, ended = min(each.arrival.at for each in streams), max(each.times[-1] for each in streams)
        tokens = sum(len(each.times) for each in streams)
        return cls(
            tokens / (ended - began), statistics.mean(first), max(first), statistics.mean(done),
            gaps[int(0.99 * len(gaps))], gaps[-1], _slowest_second(streams),
        )  # fmt: skip


def _slowest_second(streams: Sequence[Stream]) -> float:
    """Return the largest mean gap of a stream over a second (or two tokens, if these take longer)."""
    worst = 0.0
    for each in streams:
        begin = 0
        for end in range(1, len(each.times)):
            while begin < end - 1 and each.times[end] - each.times[begin + 1] >= 1.0:
                begin += 1
            if each.times[end] - each.times[begin] >= 1.0:
                worst = max(worst, (each.times[end] - each.times[begin]) / (end - begin))
    return worst


def measure(
    machine: Machine, scenario: Scenario, config: SchedulerConfig, *, seeds: int, cold: bool = False
) -> Figures:
    """Return the medians over seeds."""
    runs = [
        Figures.of(Simulation(machine, config, seed, cold).run(scenario(machine, random.Random(seed))))
        for seed in range(seeds)
    ]
    return Figures(*(statistics.median(getattr(run, name) for run in runs) for name in Figures.__slots__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default="0.1,0.3,1.0")
    parser.add_argument("--gaps", default="1", help="bounds of a single gap, in seconds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--machines", default=",".join(machine.name for machine in MACHINES))
    parser.add_argument("--rows", type=int, default=ROWS_MAX, help="maximum decode batch")
    parser.add_argument("--cold", action="store_true", help="the first requests of a worker")
    asked = parser.parse_args()
    print(" " * 33, "  ".join(f"{name:>8.8}" for name in Figures.__slots__))
    for machine in MACHINES:
        if machine.name not in asked.machines.split(","):
            continue
        for name, scenario in SCENARIOS.items():
            for target, gap in itertools.product(_floats(asked.targets), _floats(asked.gaps)):
                config = SchedulerConfig(
                    rows_max=asked.rows, inter_token_target_s=target, inter_token_s_max=gap
                )
                figures = measure(machine, scenario, config, seeds=asked.seeds, cold=asked.cold)
                told = "  ".join(f"{getattr(figures, each):8.3f}" for each in Figures.__slots__)
                print(f"{machine.name:8} {name:11} {target:5g} {gap:5g}  {told}", flush=True)


def _floats(listed: str) -> list[float]:
    return [float(each) for each in listed.split(",")]


if __name__ == "__main__":
    main()
