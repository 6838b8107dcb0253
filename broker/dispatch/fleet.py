"""Which workers live and what they can do. Pure: events and times come in, decisions go out.

Three verdicts take a worker out of service: it is *dead* (its connection is gone: it is forgotten), *silent*
(no message for a while) or *stalled* (it speaks, and its step counter stands still while rows run). A silent
or stalled worker that comes back is taken back; a dead one never: its successor has another incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from broker.dispatch.workload import Pace
from protocol.errors import Code, RequestError
from protocol.messages import PROTOCOL_VERSION, Heartbeat, Hello, Loading, Ready
from protocol.parts import Capabilities
from protocol.tasks import Task, tasks

MODELS_MAX = 256
"""Models that workers may name in the life of a gateway: it remembers them all."""
RETRY_LOADING_S_DEFAULT = 5.0
RETRY_ABSENT_S = 2.0


LOADING_PATIENCE = 4
"""So many times as long a worker that imports or loads may be silent before it is taken for hung."""


class Verdict(Enum):
    """Why a worker gets no requests although it is connected."""

    SILENT = "silent"
    STALLED = "stalled"


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of one worker process, as far as the gateway knows it."""

    incarnation: str
    model: str
    pid: int
    met_at: float
    heard_at: float
    ready: Ready | None = None
    loading: tuple[int, int] | None = None
    steps: int = 0
    stepped_at: float = 0.0
    running: int = 0
    """Rows, by its last beat."""
    beat: Heartbeat | None = None
    """The last one: what the worker says of itself."""
    draining: bool = False
    """It ends what it has, and takes nothing more."""
    held: bool = False
    """It would take more, and is not given any."""
    verdict: Verdict | None = None
    judged_at: float = 0.0
    """When it got its verdict."""
    answered_at: float | None = None
    """When it last brought requests something."""
    host: str = ""
    """The machine that it runs on, by its own word; empty: it does not say."""
    pace: Pace = field(default_factory=Pace)
    boarded: int = 0
    """Requests that it was sent, those that came from another worker among them."""

    @property
    def state(self) -> str:
        """`ready`, `loading`, `draining`, or the verdict against it."""
        if self.verdict is not None:
            return self.verdict.value
        if self.draining:
            return "draining"
        return "loading" if self.ready is None else "ready"

    @property
    def fit(self) -> bool:
        """It could take requests."""
        return self.ready is not None and self.verdict is None and not self.draining

    @property
    def serves(self) -> bool:
        """It is given requests."""
        return self.fit and not self.held

    @property
    def capabilities(self) -> Capabilities:
        return self.ready.capabilities if self.ready else Capabilities()

    def stands_in_for(self, other: Worker) -> bool:
        """What was made for the other one can go to this one."""
        return self.model == other.model and self.capabilities == other.capabilities

    @property
    def cache_bytes(self) -> int:
        """Of its requests and of stored prefixes, by its last beat."""
        prefix = self.beat.prefix if self.beat else None
        return (self.beat.cache_bytes if self.beat else 0) + (prefix.ram_bytes if prefix else 0)

    @property
    def identity(self) -> str:
        return self.ready.identity if self.ready else ""

    @property
    def plan(self) -> str:
        """What runs its model; empty: it does, alone."""
        return self.ready.plan if self.ready else ""

    @property
    def stands_in(self) -> bool:
        """It goes on with what another model began under its name."""
        return self.ready is not None and self.ready.stands_in

    @property
    def store(self) -> str:
        """Where it writes prefixes: who starts there later finds them. Empty: nowhere."""
        return self.ready.store if self.ready else ""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A model that no worker serves just now, for whose requests one will be there.

    `ready`: what the last one said, or what is to be assumed of one that was never seen.
    """

    model: str
    ready: Ready

    @property
    def capabilities(self) -> Capabilities:
        return self.ready.capabilities


@dataclass(slots=True)
class KnownModel:
    """A model that is configured, or that some worker has named, whether or not one serves it now."""

    first_seen_at: float
    last: Ready | None = None
    """What the last worker that was ready said of it."""
    load_s: float | None = None
    advanced_at: float = 0.0
    """When a worker was last heard to have made a step of it."""

    @property
    def context_length(self) -> int:
        """0: not known yet."""
        return self.last.context_length if self.last else 0


class Fleet:
    """All connected workers, every model they have ever named, and those that are configured."""

    def __init__(self, *, silent_after_s: float, stall_timeout_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._stall_timeout_s = stall_timeout_s
        self._workers: dict[str, Worker] = {}
        self.models: dict[str, KnownModel] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, incarnation: str) -> Worker | None:
        return self._workers.get(incarnation)

    # --- what workers say ---

    def objection(self, message: Hello) -> str | None:
        """Why a worker that introduces itself is not to be taken; None: it may come."""
        if message.version != PROTOCOL_VERSION:
            return f"it speaks protocol {message.version}, this gateway {PROTOCOL_VERSION}"
        if len(self.models) >= MODELS_MAX and message.model not in self.models:
            return f"this gateway has met {MODELS_MAX} models already"
        return None

    def hello(self, message: Hello, now: float) -> Worker:
        """A worker introduces itself, for the first time or again after the gateway asked."""
        worker = Worker(
            message.incarnation, message.model, message.pid, met_at=now, heard_at=now, host=message.host
        )
        self._workers[message.incarnation] = worker
        self.models.setdefault(message.model, KnownModel(first_seen_at=now))
        return worker

    def loading(self, worker: Worker, message: Loading) -> None:
        worker.loading = (message.done, message.total)

    def ready(self, worker: Worker, message: Ready, now: float) -> None:
        first, worker.ready = worker.ready is None, message
        worker.stepped_at = now
        known = self.models.setdefault(worker.model, KnownModel(first_seen_at=now))
        known.last = message
        # One that was ready when it came tells nothing about how long loading takes.
        if first and worker.loading is not None:
            known.load_s = now - worker.met_at

    def heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        if message.running and message.steps != worker.steps:
            self.advanced(worker, now)
        if message.steps != worker.steps or message.running == 0:
            worker.steps = message.steps
            worker.stepped_at = now
        worker.running = message.running
        worker.beat = message

    def heard(self, worker: Worker, now: float) -> bool:
        """Any message at all is a sign of life. True for the first one of a worker that was silent."""
        worker.heard_at = now
        if worker.verdict is not Verdict.SILENT:
            return False
        worker.verdict = None
        worker.stepped_at = now
        return True

    def gone(self, incarnation: str) -> Worker | None:
        """The verdict *dead*: the worker is forgotten. Idempotent."""
        return self._workers.pop(incarnation, None)

    # --- what the clock says ---

    def sweep(self, now: float) -> list[Worker]:
        """Judge everyone; those newly found silent or stalled are returned."""
        found = []
        for worker in self._workers.values():
            verdict = self._judge(worker, now)
            if verdict is not None and verdict is not worker.verdict:
                found.append(worker)
            if worker.verdict is None:
                worker.judged_at = now
            worker.verdict = verdict
        return found

    def hung(self, now: float, after_s: float) -> list[Worker]:
        """Those who have been under a verdict for so long: they may not come back alone. Who loads may be
        silent for longer."""
        judged = [worker for worker in self._workers.values() if worker.verdict is not None]
        limits = {True: after_s, False: LOADING_PATIENCE * after_s}
        return [w for w in judged if now - w.judged_at > limits[w.ready is not None]]

    def advanced(self, worker: Worker, now: float) -> None:
        """Its model has made a step."""
        self.models[worker.model].advanced_at = now

    def _judge(self, worker: Worker, now: float) -> Verdict | None:
        if now - worker.heard_at > self._silent_after_s:
            return Verdict.SILENT
        if worker.running > 0 and now - worker.stepped_at > self._stall_timeout_s:
            return Verdict.STALLED
        return None

    # --- where a request goes ---

    def vacancy(self, model: str) -> Vacancy:
        """What is known of a model without a worker. One that was never seen may be able to do anything: what
        it cannot, its worker refuses."""
        able = Capabilities(images=True, videos=True, embeddings=True, rerank=True)
        unseen = Ready(incarnation="", model=model, context_length=0, running_max=1, capabilities=able)
        return Vacancy(model, self.models[model].last or unseen)

    def find(
        self,
        model: str | None,
        now: float,
        load: Callable[[Worker], tuple[bool, int]],
        task: Task = "generate",
    ) -> Worker:
        """The worker with the least `load` of those that serve `model` (None: any, one made for `task` if
        there is one). Raises `RequestError`."""
        if model is not None and self.models and model not in self.models:
            known = ", ".join(sorted(self.models))
            raise RequestError(
                Code.MODEL_NOT_FOUND,
                f"The model `{model}` does not exist here. Available: {known}.",
                param="model",
            )
        candidates = [w for w in self._workers.values() if model in (None, w.model)]
        serving = [w for w in candidates if w.serves]
        if model is None:
            serving = [w for w in serving if task in tasks(w.capabilities)] or serving
        if serving:
            return min(serving, key=load)
        raise self._not_serving(model, candidates, now)

    def _not_serving(self, model: str | None, candidates: list[Worker], now: float) -> RequestError:
        loading = [w for w in candidates if w.state == "loading"]
        name = f"`{model}`" if model else "the model"
        if not loading:
            return RequestError(
                Code.WORKER_UNAVAILABLE,
                f"No worker serves {name} right now; one is expected back.",
                retry_after_s=RETRY_ABSENT_S,
            )
        worker = loading[0]
        done, total = worker.loading or (0, 0)
        progress = f" ({100 * done // total}%)" if total else ""
        known = self.models[worker.model]
        expected_s = RETRY_LOADING_S_DEFAULT if known.load_s is None else known.load_s
        left_s = max(1.0, expected_s - (now - worker.met_at))
        return RequestError(Code.MODEL_LOADING, f"{worker.model} is loading{progress}.", retry_after_s=left_s)
