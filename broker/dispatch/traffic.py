"""What has passed through the gateway: counts by model, and what happened lately. Pure, the clock handed in.

All of it is bounded: models are as many as the fleet remembers, codes are those of the error table, what
happened lately is kept in rings. No text of anybody's is in it. A token costs an addition, a step of a worker
one observation for all of its rows: every event of every stream comes by here.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from broker.dispatch.fleet import Worker
from broker.dispatch.flight import Flight
from broker.dispatch.histogram import Histogram
from protocol.errors import code_named
from protocol.messages import Finished
from protocol.tasks import runs_nothing, task_of

ENDS_MAX = 64
WORKER_EVENTS_MAX = 64
"""So much is kept of what happened lately."""

CLIENT_LEFT = "client_left"
REASONS = frozenset({"stop", "length", "tool_calls"})
"""How an answer may end that is finished; what else a worker says counts as `stop`."""

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(slots=True)
class ModelTraffic:
    """Of one model. `steps` of its workers brought `pieces` to requests, `tokens` in all. Of `prompts`, which
    have `prompt_tokens`, `hits` had something that need not be computed, `cached_tokens` in all. `ends`: by
    what was asked and how it ended. `losses`: of workers, by the verdict."""

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
class End:
    """A request that is over. `code`: as it finished, the code of its error, or `client_left`."""

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

    @property
    def failed(self) -> bool:
        return self.code not in REASONS and self.code != CLIENT_LEFT


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A worker came, became ready, or was lost: `what` says how."""

    at: float
    model: str
    incarnation: str
    pid: int
    what: str


class Traffic:
    """One per gateway."""

    def __init__(self) -> None:
        self.models: dict[str, ModelTraffic] = {}
        self.ends: deque[End] = deque(maxlen=ENDS_MAX)
        self.failures: deque[End] = deque(maxlen=ENDS_MAX)
        """Those that failed, for longer."""
        self.worker_events: deque[WorkerEvent] = deque(maxlen=WORKER_EVENTS_MAX)

    def of(self, model: str) -> ModelTraffic:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelTraffic()
        return found

    # --- what workers bring ---

    def stepped(self, worker: Worker, now: float, *, pieces: int, firsts: int, tokens: int) -> None:
        """So many requests gained a piece in one step, `firsts` of them the first of a leg.

        Whoever goes on had a piece of the step before: so long they all have waited for this one.
        """
        traffic = self.of(worker.model)
        traffic.tokens += tokens
        traffic.pieces += pieces
        traffic.steps += 1
        if pieces > firsts and worker.answered_at is not None:
            traffic.inter_token_s.observe(now - worker.answered_at, pieces - firsts)
        worker.answered_at = now

    def began(self, flight: Flight, now: float) -> None:
        """It has its first token."""
        self.of(flight.model).first_token_s.observe(now - flight.opened_at)

    def reused(self, flight: Flight) -> None:
        """It is known how much of its prompt need not be computed."""
        traffic, tokens = self.of(flight.model), flight.reuse.tokens if flight.reuse else 0
        traffic.prompts += 1
        traffic.hits += tokens > 0
        traffic.prompt_tokens += flight.prompt_tokens
        traffic.cached_tokens += tokens

    def worker(self, worker: Worker, now: float, what: str) -> None:
        """Something happened to it."""
        self.worker_events.append(WorkerEvent(now, worker.model, worker.incarnation, worker.pid, what))

    # --- ends ---

    def ended(self, flight: Flight, now: float) -> None:
        """The one place where a request is counted."""
        end = _end_of(flight, now)
        traffic = self.of(flight.model)
        traffic.ends[end.task, end.code] += 1
        traffic.resumes += end.resumes
        traffic.request_s.observe(end.seconds)
        self.ends.append(end)
        if end.failed:
            self.failures.append(end)


def _end_of(flight: Flight, now: float) -> End:
    usage = flight.terminal.usage if isinstance(flight.terminal, Finished) else None
    cached = usage.cached_tokens if usage else flight.reuse.tokens if flight.reuse else 0
    return End(
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
        resumes=max(0, flight.legs - 1),
    )


def kind_of(flight: Flight) -> str:
    """What is asked: `generate`, `embed`, `rerank`, or `count`, where nothing is run."""
    return "count" if runs_nothing(flight.request) else task_of(flight.request)


def code_of(flight: Flight) -> str:
    """How it ended; or, if it did not, its client has left."""
    end = flight.terminal
    if end is None:
        return CLIENT_LEFT
    if isinstance(end, Finished):
        return end.reason if end.reason in REASONS else "stop"
    return code_named(end.code).value
