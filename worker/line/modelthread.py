"""The model thread: it loads the model, runs its loop, and is the only one that touches MLX."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from protocol.messages import Loading, Message, Ready, Request
from protocol.parts import Resources, Sparse
from protocol.tasks import require, task_of
from protocol.workersettings import WorkerSettings
from worker.config import prefix_folder
from worker.contract import EncodingModel, Loader, Model, Preparer
from worker.laps import Laps
from worker.line.introduction import policy_of, ready_of, ready_to_encode
from worker.line.outbox import Outbox
from worker.line.pool import PreparerPool
from worker.schedule.admission import AdmissionWindow
from worker.schedule.commands import Command, Stop
from worker.schedule.counters import Counters
from worker.schedule.drafting import Drafting
from worker.schedule.encoding import STEP_SHARE, EncodingLoop
from worker.schedule.following import Following
from worker.schedule.loop import Loop
from worker.schedule.pace import Pace
from worker.schedule.publisher import Publisher
from worker.schedule.recall import Recall
from worker.schedule.scheduler import Scheduler
from worker.schedule.sparse import Thinning
from worker.schedule.store import Limits, open_store
from worker.texts import TextsPreparer

log = logging.getLogger(__name__)


class ModelThread:
    """What other threads may know of it is in its public attributes; `inbox` is how they tell it anything."""

    def __init__(
        self,
        loader: Loader,
        settings: WorkerSettings,
        incarnation: str,
        outbox: Outbox,
        device_memory: Callable[[], Resources] = Resources,
        laps: Laps | None = None,
    ) -> None:
        """`device_memory`: what the model's arrays take; asked on the thread itself. `laps`: of the process's
        start, which end here."""
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.counters = Counters()
        self.pool: PreparerPool | None = None
        """There from when the model has been loaded; whoever closes the process closes it."""
        self.failure: BaseException | None = None
        """Why it ended, if it was not told to."""
        self._loader = loader
        self._settings = settings
        self._incarnation = incarnation
        self._outbox = outbox
        self._device_memory = device_memory
        self._laps = laps or Laps()
        self._loaded = 0, 0
        self._ready: Ready | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def state(self) -> Message:
        """What a gateway is told that has just come: ready, or how far the loading is."""
        return self._ready or self._loading()

    @property
    def is_loaded(self) -> bool:
        return self._ready is not None

    def require(self, request: Request) -> None:
        """Raises `RequestError` for what the model is not made for."""
        if self._ready is not None:
            require(task_of(request), self._ready.capabilities, self._ready.model)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Once the step that runs has ended."""
        self.inbox.put(Stop())

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # --- on the thread itself ---

    def _run(self) -> None:
        try:
            model = self._loader.load(self._report_progress)
            if isinstance(model, EncodingModel):
                self._make_encoding_loop(model).run()
            else:
                self._run_loop(self._make_loop(model))
        except BaseException as error:  # the thread's boundary: the I/O thread decides what it means
            self.failure = error
        self._outbox.wake()

    def _run_loop(self, loop: Loop) -> None:
        try:
            loop.run()
        finally:
            if loop.store:
                loop.store.close()

    def _report_progress(self, done: int, total: int) -> None:
        self._loaded = done, total
        self._outbox.put(self._loading())

    def _loading(self) -> Loading:
        done, total = self._loaded
        return Loading(incarnation=self._incarnation, done=done, total=total)

    def _make_loop(self, model: Model) -> Loop:
        settings = self._settings
        policy = policy_of(settings, model)
        ready = ready_of(self._incarnation, model.facts, policy, stands_in=settings.stands_in)
        if ready.context_length < model.facts.context_length:
            log.warning(
                "memory holds a context of %d tokens, of the model's %d",
                ready.context_length,
                model.facts.context_length,
            )
        self._open_pool(partial(model.open_preparer, ready.context_length))
        limits = Limits(settings.prefix_cache_ram, settings.prefix_cache_disk, prefix_folder(settings))
        store = open_store(model, limits, self.inbox.put)
        self._tell_ready(msgspec.structs.replace(ready, store=store.name if store else ""))
        return Loop(
            model=model,
            scheduler=Scheduler(policy, store.index if store else None),
            store=store,
            inbox=self.inbox,
            publisher=Publisher(self._incarnation, self._outbox.put, self._outbox.depth),
            admission=AdmissionWindow(settings.admission_window_s),
            counters=self.counters,
            drafting=_drafting(settings, model, store.recall if store else None),
            thinning=_thinning(settings, model),
            device_memory=self._device_memory,
        )

    def _make_encoding_loop(self, model: EncodingModel) -> EncodingLoop:
        settings = self._settings
        self._open_pool(model.open_preparer)
        self._tell_ready(ready_to_encode(self._incarnation, model.facts, settings))
        target_s = STEP_SHARE * settings.inter_token_target_s
        return EncodingLoop(
            model=model,
            pace=Pace(target_s=target_s, tokens_max=settings.prefill_tokens),
            inbox=self.inbox,
            publisher=Publisher(self._incarnation, self._outbox.put, self._outbox.depth),
            counters=self.counters,
            device_memory=self._device_memory,
        )

    def _open_pool(self, open_preparer: Callable[[], Preparer | TextsPreparer]) -> None:
        self.pool = PreparerPool(open_preparer)
        self.pool.warm()
        self._laps.lap("preparers")

    def _tell_ready(self, ready: Ready) -> None:
        self._laps.lap("prefixes")
        log.info("ready in %.2f s: %s", self._laps.total_s, self._laps)
        self._ready = msgspec.structs.replace(ready, start_s=self._laps.rounded())
        self._outbox.put(self._ready)


def _thinning(settings: WorkerSettings, model: Model) -> Thinning:
    keep = settings.sparse_prefill
    return Thinning(
        model.engine.weigher,
        None if keep is None else Sparse(keep=keep),
        is_able=model.engine.can_leave_out,
        target_s=settings.inter_token_target_s,
        tokens_max=settings.prefill_tokens,
    )


def _drafting(settings: WorkerSettings, model: Model, recall: Recall | None) -> Drafting:
    # Whoever names a draft model wants drafts.
    wish = settings.speculation or ("auto" if settings.draft_model else "off")
    drafter = model.engine.drafter
    following = Following(drafter, settings.inter_token_target_s, recall) if drafter else None
    return Drafting(is_on=wish == "auto", following=following, column_price=model.column_price)
