"""Application state that the routes use."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.requests import Request

from broker.answers.answer import Scheduler
from broker.answers.answers import DurableAnswers
from broker.api.batches.runner import BatchRunner
from broker.api.responses import store
from broker.api.responses.answer import ResponseBuilder
from broker.api.responses.store import ResponseStore
from broker.dispatch.deferred import DeferredQueue, free_rows
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.inspection import Inspection
from broker.dispatch.traffic import HttpCounters
from broker.journal.file import Name, Quota, StoredEntry
from broker.journal.journal import Journal
from broker.middleware.auth import ApiKeys
from broker.middleware.context import RequestContext
from broker.middleware.limits import KeyConcurrency
from broker.middleware.media_memory import MediaMemory
from broker.server.offload import BodyOffload
from protocol.settings.gateway import MEDIA_MEMORY, GatewaySettings

CANCELLED_MAX = 256
"""Maximum number of cancelled requests that are remembered, so that they can be cancelled again."""

Fetch = Callable[[str, Callable[[int], None]], Awaitable[bytes]]
"""A `broker.requests.fetching.Fetcher`; that module is imported only if it is needed."""


def scheduler() -> Scheduler:
    """Return the scheduler of the running event loop."""
    loop = asyncio.get_running_loop()
    return Scheduler(time.monotonic, loop.call_soon, loop.call_later)


@dataclass(slots=True, eq=False)
class GatewayState:
    """The gateway's components, built in `__main__`; none is replaced."""

    settings: GatewaySettings
    dispatcher: Dispatcher
    """The fleet and the flights."""
    line_errors: Mapping[str, int]
    """Live counters of transport errors."""
    api_keys_store: ApiKeys = field(default_factory=ApiKeys)
    key_concurrency: KeyConcurrency = field(default_factory=KeyConcurrency)
    answering: dict[tuple[str, str], ResponseBuilder] = field(default_factory=dict)
    """The running responses, by owner and id."""
    cancelled: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=CANCELLED_MAX))
    """Owner and id of the last cancelled requests."""
    answers: DurableAnswers = field(init=False)
    """Answers that outlive the connections of their clients."""
    responses: ResponseStore = field(init=False)
    """Stored responses and conversations, in the journal."""
    deferred: DeferredQueue = field(init=False)
    """What waits for a free row: responses in the background and lines of batches."""
    offload: BodyOffload = field(default_factory=BodyOffload)
    """Threads for large bodies."""
    http_counters: HttpCounters = field(default_factory=HttpCounters)
    watchers: set[object] = field(default_factory=set)
    """Open streams of the status and of orders."""
    inspection: Inspection | None = None
    """Captures requests; None: disabled."""
    media: MediaMemory = field(default_factory=lambda: MediaMemory(MEDIA_MEMORY))
    """Memory of the images and videos of all requests."""
    fetch: Fetch | None = None
    """Fetches remote images; None: disabled."""
    batches: BatchRunner | None = None
    """Runs batches; None: disabled."""
    journal: Journal = field(default_factory=lambda: Journal(None, 0))
    """Of answers and stored responses."""
    started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.answers = DurableAnswers(
            time.monotonic,
            scheduler,
            give_up=self.dispatcher.give_up,
            window_s=self.settings.reattach_window_s,
        )

        def read(name: Name) -> Awaitable[StoredEntry | None]:
            return asyncio.to_thread(self.journal.read, name)

        self.responses = ResponseStore(self.journal, read, keeps=self.settings.responses_max > 0)
        self.deferred = deferred = DeferredQueue(partial(free_rows, self.dispatcher), time.monotonic)

        def on_closed() -> None:
            with suppress(RuntimeError):  # the garbage collector closes flights whose loop has ended
                asyncio.get_running_loop().call_soon(deferred.freed)

        self.dispatcher.on_closed = on_closed

    def prefix_namespace(self, context: RequestContext) -> str:
        """Return the namespace of a request's prefixes: its owner's, or empty if all share theirs."""
        return "" if self.settings.prefix_sharing == "all" else context.owner


def journal_at(path: Path | None, settings: GatewaySettings) -> Journal:
    """Return the journal in a file; None: in memory, for stored responses alone."""
    quotas = {store.KIND: Quota(settings.responses_max, settings.responses_bytes_max)}
    return Journal(path, settings.journal_max if path else settings.responses_bytes_max, quotas)


def gateway_of(request: Request) -> GatewayState:
    """Return the gateway that serves this request."""
    gateway: GatewayState = request.app.state.gateway
    return gateway
