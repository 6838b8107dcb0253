"""Traffic statistics: counts by model and by HTTP status, and recent events. Pure; the clock is injected.

Everything is bounded: models by the fleet, codes by the error table, recent events by ring buffers. No text
of requests is stored. Every event of every stream is counted here, so costs are low: one addition per
token, one observation per worker step for all its rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from protocol.errors import code_named
from protocol.messages import Finished
from protocol.tasks import runs_nothing, task_of

ENDS_MAX = 64
WORKER_EVENTS_MAX = 64
"""Size of the ring buffers of recent events."""

CLIENT_LEFT = "client_left"
REASONS = frozenset({"stop", "length", "tool_calls"})
"""Finish reasons; any other one that a worker reports counts as `stop`."""

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

FIRST_TOKENS_MAX = 512
"""Number of recent times to first token, for percentiles."""
REFUSALS_MAX = 64
PATH_CHARS_MAX = 128


class Histogram:
    """Histogram: counts by bucket, with the `sum` and `count` of all observations."""

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: inclusive upper bounds of the buckets, ascending; one more bucket holds the rest."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Return the number of observations at or below each bound, and last the total."""
        return list(accumulate(self._counts))


@dataclass(slots=True)
class ModelTraffic:
    """Counters of one model. `steps` of its workers brought `pieces` (deltas) with `tokens` in all.

    Of `prompts` with `prompt_tokens` in all, `hits` had a prefix hit, of `cached_tokens` in all. `ends`: by
    task and code. `losses`: of workers, by health state.
    """

    tokens: int = 0
    pieces: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompts: int = 0
    hits: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    request_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A finished request. `code`: its finish reason, the code of its error, or `client_left`. `key`: name of
    its API key. `phases`: each with the seconds from the request's arrival to its start."""

    at: float
    id: str
    model: str
    task: str
    code: str
    prompt_tokens: int
    answered: int
    cached_tokens: int
    first_token_s: float | None
    seconds: float
    resumes: int
    key: str
    phases: tuple[tuple[str, float], ...]

    @property
    def failed(self) -> bool:
        return self.code not in REASONS and self.code != CLIENT_LEFT


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A worker connected, became ready, or was lost. `what`: which of these, or how it was lost."""

    at: float
    model: str
    incarnation: str
    pid: int
    what: str


class Traffic:
    """Traffic statistics of one gateway."""

    def __init__(self) -> None:
        self.models: dict[str, ModelTraffic] = {}
        self.ends: deque[RequestEnd] = deque(maxlen=ENDS_MAX)
        self.failures: deque[RequestEnd] = deque(maxlen=ENDS_MAX)
        """The failed ones, which are kept for longer."""
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=FIRST_TOKENS_MAX)
        """Recent first tokens: when, and the seconds that they took."""
        self.worker_events: deque[WorkerEvent] = deque(maxlen=WORKER_EVENTS_MAX)

    def of(self, model: str) -> ModelTraffic:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelTraffic()
        return found

    # --- output of workers ---

    def stepped(self, worker: Worker, now: float, *, pieces: int, first_tokens: int, tokens: int) -> None:
        """Count a step with `pieces` deltas, `first_tokens` of them the first of an attempt, and `tokens` in
        all.

        The other requests had a delta in the previous step, so the time since then is their inter-token time.
        """
        traffic = self.of(worker.model)
        traffic.tokens += tokens
        traffic.pieces += pieces
        traffic.steps += 1
        if pieces > first_tokens and worker.answered_at is not None:
            traffic.inter_token_s.observe(now - worker.answered_at, pieces - first_tokens)
        worker.answered_at = now

    def began(self, flight: Flight, now: float) -> None:
        """Count a flight's first token. Lines of batches wait for others, so their times mean nothing."""
        if flight.is_batch:
            return
        seconds = now - flight.opened_at
        self.of(flight.model).first_token_s.observe(seconds)
        self.first_tokens.append((now, seconds))

    def reused(self, flight: Flight) -> None:
        """Count a flight's prefix hit, or miss."""
        traffic, tokens = self.of(flight.model), flight.reuse.tokens if flight.reuse else 0
        traffic.prompts += 1
        traffic.hits += tokens > 0
        traffic.prompt_tokens += flight.prompt_tokens
        traffic.cached_tokens += tokens

    def worker(self, worker: Worker, now: float, what: str) -> None:
        """Record an event of a worker."""
        self.worker_events.append(WorkerEvent(now, worker.model, worker.incarnation, worker.pid, what))

    # --- ends ---

    def ended(self, flight: Flight, now: float) -> None:
        """Count a request that has ended; the only place that does."""
        end = _end_of(flight, now)
        traffic = self.of(flight.model)
        traffic.ends[end.task, end.code] += 1
        traffic.resumes += end.resumes
        if not flight.is_batch:
            traffic.request_s.observe(end.seconds)
        self.ends.append(end)
        if end.failed:
            self.failures.append(end)


def _end_of(flight: Flight, now: float) -> RequestEnd:
    usage = flight.terminal.usage if isinstance(flight.terminal, Finished) else None
    cached = usage.cached_tokens if usage else flight.reuse.tokens if flight.reuse else 0
    return RequestEnd(
        at=now,
        id=flight.id,
        model=flight.model,
        task=kind_of(flight),
        code=code_of(flight),
        prompt_tokens=usage.prompt_tokens if usage else flight.prompt_tokens,
        answered=flight.progress,
        cached_tokens=cached,
        first_token_s=flight.started_at and flight.started_at - flight.opened_at,
        seconds=now - flight.opened_at,
        resumes=max(0, flight.attempts - 1),
        key=flight.key,
        phases=phases_of(flight),
    )


def phases_of(flight: Flight) -> tuple[tuple[str, float], ...]:
    """Return the flight's phases, each with the seconds from the flight's opening to its start."""
    return tuple((phase, round(at - flight.opened_at, 4)) for phase, at in flight.phases)


def kind_of(flight: Flight) -> str:
    """Return the task: `generate`, `embed`, `rerank`, or `count` if no model runs."""
    return "count" if runs_nothing(flight.request) else task_of(flight.request)


def code_of(flight: Flight) -> str:
    """Return the finish reason or error code; `client_left` if the flight has not ended."""
    end = flight.terminal
    if end is None:
        return CLIENT_LEFT
    if isinstance(end, Finished):
        return end.reason if end.reason in REASONS else "stop"
    return code_named(end.code).value


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was answered with an error. `id`: the one in the response."""

    at: float
    id: str
    method: str
    path: str
    status: int
    code: str


class HttpCounters:
    """HTTP counters of one gateway: status codes, error codes, the latest errors, and connections beyond the
    limit.

    They include requests that never reached a model. Of a request's content, only the path is stored.
    """

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS_MAX)
        self.connections_turned_away = 0

    def answered(self, status: int) -> None:
        """Count the status of a response."""
        self.statuses[status] += 1

    def failed(self, code: str) -> None:
        """Count an error code."""
        self.errors[code] += 1

    def turned_away(self) -> None:
        """Count a connection beyond the limit."""
        self.connections_turned_away += 1

    def refused(self, at: float, *, id: str, method: str, path: str, status: int, code: str) -> None:
        """Record a request that was answered with an error."""
        self.refusals.append(Refusal(at, id, method, path[:PATH_CHARS_MAX], status, code))
