"""Fleet: the connected workers, their health and their models. Pure; times are injected.

Four health states take a worker out of service. *dead*: the connection is closed, and the worker is removed.
*silent*: no message for a while. *stalled*: messages arrive, but the step counter does not advance while
rows run. *starving*: a request repeatedly makes no progress, although the worker runs. A silent or stalled
worker may recover. A dead or starving one never does: its successor has another incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from broker.dispatch.cost_model import ThroughputEstimate
from protocol.adapters import SEPARATOR
from protocol.common.error_text import closest_match
from protocol.errors import Code, RequestError
from protocol.messages import PROTOCOL_VERSION, Heartbeat, Hello, Loading, Ready
from protocol.tasks import Task, tasks
from protocol.types import AdapterInfo, Capabilities

MODELS_MAX = 256
"""Maximum number of models that workers may report during the life of a gateway, which keeps them all."""
RETRY_LOADING_S_DEFAULT = 5.0
RETRY_ABSENT_S = 2.0


LOADING_PATIENCE = 4
"""Factor on the hung timeout for a worker that is still importing or loading."""


class HealthState(Enum):
    """Reason why a connected worker gets no requests."""

    SILENT = "silent"
    STALLED = "stalled"
    STARVING = "starving"


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker process, as known to the gateway."""

    incarnation: str
    model: str
    pid: int
    connected_at: float
    last_message_at: float
    ready: Ready | None = None
    loading: tuple[int, int] | None = None
    steps: int = 0
    stepped_at: float = 0.0
    running: int = 0
    """Running rows, by the last heartbeat."""
    beat: Heartbeat | None = None
    """The last heartbeat."""
    draining: bool = False
    """Whether it finishes its requests and accepts no more."""
    held: bool = False
    """Whether the gateway sends it no new requests, although it would accept them."""
    verdict: HealthState | None = None
    judged_at: float = 0.0
    """Time of the change to the present `verdict`."""
    answered_at: float | None = None
    """Time of the last output for any request."""
    host: str = ""
    """The machine that it runs on, as it reports; empty if not reported."""
    throughput: ThroughputEstimate = field(default_factory=ThroughputEstimate)
    awaited_adapters: set[str] = field(default_factory=set)
    """Adapters that it was told to load and has not replied about."""
    dispatched: int = 0
    """Number of requests sent to it, including those resent from another worker."""

    @property
    def state(self) -> str:
        """`ready`, `loading`, `draining`, or the health state in `verdict`."""
        if self.verdict is not None:
            return self.verdict.value
        if self.draining:
            return "draining"
        return "loading" if self.ready is None else "ready"

    @property
    def fit(self) -> bool:
        """Whether it could take requests."""
        return self.ready is not None and self.verdict is None and not self.draining

    @property
    def serves(self) -> bool:
        """Whether it is sent requests."""
        return self.fit and not self.held

    @property
    def capabilities(self) -> Capabilities:
        return self.ready.capabilities if self.ready else Capabilities()

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """Its adapters, by name."""
        return {info.name: info for info in self.ready.adapters} if self.ready else {}

    def digest_of(self, adapter: str) -> str | None:
        """Return the digest of one of its adapters; empty for none, None for one that it does not have."""
        if not adapter:
            return ""
        return (
            next((info.digest for info in self.ready.adapters if info.name == adapter), None)
            if self.ready
            else None
        )

    def can_replace(self, other: Worker) -> bool:
        """Return whether a request built for `other` can be sent to this worker."""
        return self.model == other.model and self.capabilities == other.capabilities

    @property
    def cache_bytes(self) -> int:
        """Memory of its requests' caches and of its prefix cache, by the last heartbeat."""
        prefix = self.beat.prefix if self.beat else None
        return (self.beat.cache_bytes if self.beat else 0) + (prefix.ram_bytes if prefix else 0)

    @property
    def refuses_long(self) -> bool:
        """Whether its machine is so short of memory that it refuses new long prompts."""
        pressure = self.beat.pressure if self.beat else None
        return pressure is not None and pressure.relief == "refuse_long"

    @property
    def identity(self) -> str:
        return self.ready.identity if self.ready else ""

    @property
    def plan(self) -> str:
        """The plan that runs its model; empty: a single process."""
        return self.ready.plan if self.ready else ""

    @property
    def stands_in(self) -> bool:
        """Whether it may continue answers that a different model of this name began."""
        return self.ready is not None and self.ready.stands_in

    @property
    def store(self) -> str:
        """Its prefix store on disk, read by workers that start with it later; empty if none."""
        return self.ready.store if self.ready else ""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model that no worker serves now, but that will be loaded for its requests.

    `ready`: the last worker's `Ready`, or assumptions if there never was one.
    """

    model: str
    ready: Ready

    @property
    def capabilities(self) -> Capabilities:
        return self.ready.capabilities


class Target(NamedTuple):
    """Target of a request: a worker, or the unloaded model that it waits for, and an adapter there."""

    worker: Worker | UnloadedModel
    adapter: str = ""
    """Empty for none."""

    @property
    def model(self) -> str:
        return self.worker.model

    @property
    def capabilities(self) -> Capabilities:
        return self.worker.capabilities

    @property
    def name(self) -> str:
        """The name of what answers: the model, or MODEL:ADAPTER."""
        return f"{self.model}{SEPARATOR}{self.adapter}" if self.adapter else self.model


@dataclass(slots=True)
class ModelEntry:
    """A model that is configured or was reported by a worker, whether or not one serves it now."""

    first_seen_at: float
    last: Ready | None = None
    """The `Ready` of its last worker."""
    load_s: float | None = None
    advanced_at: float = 0.0
    """Time of the last reported step of any of its workers."""

    @property
    def context_length(self) -> int:
        """Context length in tokens; 0 if not known yet."""
        return self.last.context_length if self.last else 0


def unseen(model: str) -> Ready:
    """Return the assumptions about a model that no worker has reported: all capabilities; its worker refuses
    the rest."""
    able = Capabilities(images=True, videos=True, embeddings=True, rerank=True)
    return Ready(incarnation="", model=model, context_length=0, running_max=1, capabilities=able)


def unknown_model(model: str, known: Iterable[str]) -> RequestError:
    """Make the error for a model that does not exist, with the name that may be meant: in another case, or
    without the prefix of a vendor or the tag of a size."""
    names = sorted(known)
    short = {name.rpartition("/")[2].casefold(): name for name in names}
    meant = short.get(model.rpartition("/")[2].partition(":")[0].casefold())
    hint = f"; did you mean {meant}?" if meant else closest_match(model, names) or "."
    message = f"The model `{model[:200]}` does not exist here{hint} Available: {', '.join(names)}."
    return RequestError(Code.MODEL_NOT_FOUND, message, param="model")


class Fleet:
    """All connected workers, and all models that they have reported or that are configured."""

    def __init__(self, *, silent_after_s: float, stall_timeout_s: float) -> None:
        self._silent_after_s = silent_after_s
        self.stall_timeout_s = stall_timeout_s
        self._workers: dict[str, Worker] = {}
        self.models: dict[str, ModelEntry] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, incarnation: str) -> Worker | None:
        return self._workers.get(incarnation)

    # --- worker messages ---

    def objection(self, message: Hello) -> str | None:
        """Return the reason to reject a new worker; None if it is accepted."""
        if message.version != PROTOCOL_VERSION:
            return f"its protocol version is {message.version}, this gateway's is {PROTOCOL_VERSION}"
        if len(self.models) >= MODELS_MAX and message.model not in self.models:
            return f"this gateway already has {MODELS_MAX} models, the maximum"
        return None

    def hello(self, message: Hello, now: float) -> Worker:
        """Add a worker that sends a Hello, for the first time or at the gateway's request."""
        worker = Worker(
            message.incarnation,
            message.model,
            message.pid,
            connected_at=now,
            last_message_at=now,
            host=message.host,
        )
        self._workers[message.incarnation] = worker
        self.models.setdefault(message.model, ModelEntry(first_seen_at=now))
        return worker

    def loading_progress(self, model: str) -> tuple[int, int] | None:
        """Return the bytes of weights that a worker has loaded, and of all; None: none is loading."""
        found = (worker for worker in self if worker.model == model and worker.ready is None)
        return next((worker.loading for worker in found if worker.loading), None)

    def loading(self, worker: Worker, message: Loading) -> None:
        worker.loading = (message.done, message.total)

    def ready(self, worker: Worker, message: Ready, now: float) -> None:
        first, worker.ready = worker.ready is None, message
        worker.stepped_at = now
        known = self.models.setdefault(worker.model, ModelEntry(first_seen_at=now))
        known.last = message
        # A worker that was ready when it connected gives no load time.
        if first and worker.loading is not None:
            known.load_s = now - worker.connected_at

    def heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        if message.running and message.steps != worker.steps:
            self.advanced(worker, now)
        if message.steps != worker.steps or message.running == 0:
            worker.steps = message.steps
            worker.stepped_at = now
        worker.running = message.running
        worker.beat = message

    def touch(self, worker: Worker, now: float) -> bool:
        """Record that a message arrived. Return True for the first one of a silent worker."""
        worker.last_message_at = now
        if worker.verdict is not HealthState.SILENT:
            return False
        worker.verdict = None
        worker.stepped_at = now
        return True

    def gone(self, incarnation: str) -> Worker | None:
        """Remove a dead worker. Idempotent."""
        return self._workers.pop(incarnation, None)

    # --- the clock ---

    def sweep(self, now: float) -> list[Worker]:
        """Update all health states; return the workers that became silent or stalled."""
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
        """Return workers out of service for more than `after_s`, which may not recover on their own.

        Loading workers have `LOADING_PATIENCE` times as long; starving ones are returned at once.
        """
        judged = [worker for worker in self._workers.values() if worker.verdict is not None]
        limits = {True: after_s, False: LOADING_PATIENCE * after_s}
        return [
            worker
            for worker in judged
            if worker.verdict is HealthState.STARVING
            or now - worker.judged_at > limits[worker.ready is not None]
        ]

    def advanced(self, worker: Worker, now: float) -> None:
        """Record a step of the worker's model."""
        self.models[worker.model].advanced_at = now

    def _judge(self, worker: Worker, now: float) -> HealthState | None:
        if worker.verdict is HealthState.STARVING:
            return HealthState.STARVING
        if now - worker.last_message_at > self._silent_after_s:
            return HealthState.SILENT
        if worker.running > 0 and now - worker.stepped_at > self.stall_timeout_s:
            return HealthState.STALLED
        return None

    # --- choice of a worker ---

    def unloaded(self, model: str) -> UnloadedModel:
        """Return what is known of a model without a worker."""
        return UnloadedModel(model, self.models[model].last or unseen(model))

    def find(
        self,
        model: str | None,
        now: float,
        load: Callable[[Worker], tuple[bool, int]],
        task: Task = "generate",
    ) -> Worker:
        """Return the least loaded worker that serves `model`. Raises `RequestError`.

        `model`: None means any model, preferably one for `task`. `Failover.choose_replica` may exchange the
        worker for a replica.
        """
        if model is not None and self.models and model not in self.models:
            raise unknown_model(model, self.models)
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
                f"No worker serves {name} right now. Retry later.",
                retry_after_s=RETRY_ABSENT_S,
            )
        worker = loading[0]
        done, total = worker.loading or (0, 0)
        progress = f" ({100 * done // total}%)" if total else ""
        known = self.models[worker.model]
        expected_s = RETRY_LOADING_S_DEFAULT if known.load_s is None else known.load_s
        left_s = max(1.0, expected_s - (now - worker.connected_at))
        return RequestError(Code.MODEL_LOADING, f"{worker.model} is loading{progress}.", retry_after_s=left_s)
