"""The model thread: loads the model and runs its loop, within limits that follow from settings and memory.

Only this thread uses MLX.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from protocol.adapters import salt_with
from protocol.common import gc_heap
from protocol.common.cache_folder import prefix_folder
from protocol.common.progress import ProgressWatch
from protocol.errors import adapter_not_found
from protocol.messages import Generate, Loading, Message, Ready, Request
from protocol.settings.worker import WorkerSettings
from protocol.tasks import require, task_of
from protocol.types import AdapterInfo, KVCacheQuantization, Resources, SparsePrefill
from worker.core.batching_window import BatchingWindow
from worker.core.commands import Command, Stop
from worker.core.embedding_core import STEP_SHARE, EmbeddingCore
from worker.core.engine_core import EngineCore
from worker.core.failures import starved_after_s
from worker.core.memory_reservations import Reservations
from worker.core.prefill import PrefillCostModel
from worker.core.prefix.store import StoreLimits, open_store
from worker.core.publisher import Counters, Publisher
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.sparse_prefill import SparsePrefillQueue
from worker.core.speculation import Speculation
from worker.gateway.outbox import Outbox
from worker.input.pool import PreparerPool
from worker.interfaces import EmbeddingModel, Loader, Model, ModelError, Preparer, TextsPreparer
from worker.process.device_errors import DeviceError
from worker.process.startup_timer import StartupTimer
from worker.values import KVQuantization, ModelInfo

log = logging.getLogger(__name__)

_IMAGES_SHARE = 1 / 8
"""Default share of the cache memory for image embeddings. In most families an image's embedding takes less
than an eighth of its tokens' KV cache, so an image whose KV cache fits has room for its embedding."""
_IMAGES_DEFAULT = 2**28


def policy_of(settings: WorkerSettings, model: Model) -> SchedulerConfig:
    """Return the scheduler's configuration."""
    given = settings.cache_limit_bytes
    limit = model.info.cache_bytes_max if given is None else given
    adapters = sum(info.bytes for info in model.adapters.infos) if model.adapters else 0
    images = _image_bytes(settings, model.info, limit)
    return SchedulerConfig(
        rows_max=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        inter_token_target_s=settings.inter_token_target_s,
        inter_token_s_max=settings.inter_token_max_s,
        bytes_max=None if limit is None else limit - images,
        row_bytes=model.engine.row_bytes,
        image_bytes_max=images,
        aside_bytes=max(adapters, settings.adapter_memory),
    )


def _image_bytes(settings: WorkerSettings, facts: ModelInfo, limit: int | None) -> int:
    """Return the memory for image embeddings: at most half of the cache memory."""
    if not (facts.capabilities.images or facts.capabilities.videos):
        return 0
    if limit is None:
        return _IMAGES_DEFAULT if settings.image_cache is None else settings.image_cache
    return (
        round(limit * _IMAGES_SHARE)
        if settings.image_cache is None
        else min(settings.image_cache, limit // 2)
    )


def context_length(facts: ModelInfo, policy: SchedulerConfig) -> int:
    """Return the maximum tokens of a prompt and its output: the model's context, or less if a single row does
    not fit into memory. Call it on the model thread."""
    return reservations_of(policy).tokens_max(1 + facts.context_length)


def reservations_of(policy: SchedulerConfig) -> Reservations:
    """Return the reservations of a worker without rows."""
    return Reservations(policy.bytes_max, policy.row_bytes, policy.aside_bytes)


def ready_to_encode(incarnation: str, facts: ModelInfo, settings: WorkerSettings) -> Ready:
    """Return the `Ready` message of an embedding model or reranker, which has no caches."""
    return Ready(
        incarnation=incarnation,
        model=facts.name,
        context_length=facts.context_length,
        running_max=settings.max_running,
        parameters=facts.parameters,
        capabilities=facts.capabilities,
        identity=facts.identity,
    )


def store_limits(settings: WorkerSettings, bytes_max: int | None) -> StoreLimits:
    """Return the limits of the prefix cache, in memory at most the `bytes_max` of all caches."""
    known = [most for most in (settings.prefix_cache_ram, bytes_max) if most is not None]
    return StoreLimits(
        min(known, default=None),
        settings.prefix_cache_disk,
        prefix_folder(settings.prefix_cache_dir, os.environ, sys.platform),
        settings.prefix_cache_disk_share,
        settings.prefix_cache_writes,
    )


def ready_of(
    incarnation: str, facts: ModelInfo, policy: SchedulerConfig, *, stands_in: bool = False
) -> Ready:
    """Return the `Ready` message with the model's capacity. Call it on the model thread. `stands_in`: as in
    `Ready`."""
    ledger, kv = reservations_of(policy), facts.kv_quantization
    return Ready(
        incarnation=incarnation,
        model=facts.name,
        context_length=context_length(facts, policy),
        running_max=policy.rows_max,
        parameters=facts.parameters,
        capabilities=facts.capabilities,
        cache_bytes_max=None if policy.bytes_max is None else ledger.bytes_max,
        tokens_max=ledger.tokens_max(1 + policy.rows_max * facts.context_length),
        identity=facts.identity,
        plan=facts.plan,
        stands_in=stands_in,
        token_bytes_max=facts.token_bytes_max,
        exactness=facts.exactness,
        kv_quantization=None if kv is None else _told(kv),
    )


def _told(kv: KVQuantization) -> KVCacheQuantization:
    return KVCacheQuantization(bits=kv.bits, group_size=kv.group_size)


class ModelThread:
    """The model thread. Other threads read its public attributes and send commands through `inbox`."""

    def __init__(
        self,
        loader: Loader,
        settings: WorkerSettings,
        incarnation: str,
        outbox: Outbox,
        device_memory: Callable[[], Resources] = Resources,
        timer: StartupTimer | None = None,
    ) -> None:
        """`device_memory`: returns MLX's memory usage; called on the model thread. `timer`: timer of the
        process's start, which ends here."""
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.counters = Counters()
        self.pool: PreparerPool | None = None
        """Set when the model is loaded; closed by the owner of the process."""
        self.failure: BaseException | None = None
        """The exception that ended the thread, if it was not stopped."""
        self._loader = loader
        self._settings = settings
        self._incarnation = incarnation
        self._outbox = outbox
        self._device_memory = device_memory
        self._timer = timer or StartupTimer()
        self._loaded = 0, 0
        self._ready: Ready | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def state(self) -> Message:
        """Message for a gateway that has just connected: `Ready`, or `Loading` with the progress."""
        return self._ready or self._loading()

    @property
    def is_loaded(self) -> bool:
        return self._ready is not None

    @property
    def loaded(self) -> tuple[int, int]:
        """Bytes loaded, and in total."""
        return self._loaded

    def require(self, request: Request) -> None:
        """Raise `RequestError` if the model does not support the request's task."""
        if self._ready is not None:
            require(task_of(request), self._ready.capabilities, self._ready.model)

    def with_adapter(self, request: Request) -> Request:
        """Return the request with a salt that only requests with its adapter share. Raises `RequestError` if
        there is no such adapter."""
        if not isinstance(request, Generate) or self._ready is None:
            return request
        digests = {info.name: info.digest for info in self._ready.adapters}
        if request.adapter and request.adapter not in digests:
            raise adapter_not_found(self._ready.model, request.adapter)
        salt = salt_with(request.cache_salt, digests.get(request.adapter, ""))
        return msgspec.structs.replace(request, cache_salt=salt)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread after the current step."""
        self.inbox.put(Stop())

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # --- on the thread itself ---

    def _run(self) -> None:
        try:
            model = self._loader.load(self._report_progress)
            gc_heap.freeze()
            if isinstance(model, EmbeddingModel):
                self._make_encoding_loop(model).run()
            else:
                self._run_loop(self._make_loop(model))
        except BaseException as error:  # the thread's boundary: the I/O thread handles it
            self.failure = error
        self._outbox.wake()

    def _run_loop(self, loop: EngineCore) -> None:
        try:
            loop.run()
        except DeviceError:
            raise  # at once: other workers wait for these requests, and may not need what is still unwritten
        except BaseException:
            _close_store(loop)
            raise
        _close_store(loop)

    def _report_progress(self, done: int, total: int) -> None:
        self._loaded = done, total
        self._outbox.put(self._loading())

    def _loading(self) -> Loading:
        done, total = self._loaded
        return Loading(incarnation=self._incarnation, done=done, total=total)

    def _make_loop(self, model: Model) -> EngineCore:
        settings = self._settings
        adapters = list(model.adapters.infos) if model.adapters else []
        if settings.sparse_prefill is not None and model.info.kv_quantization:
            raise ModelError(f"{model.info.name}: --sparse-prefill cannot be combined with --kv-bits.")
        policy = policy_of(settings, model)
        ready = ready_of(self._incarnation, model.info, policy, stands_in=settings.stands_in)
        if ready.context_length < model.info.context_length:
            log.warning(
                "memory limits the context to %d of the model's %d tokens",
                ready.context_length,
                model.info.context_length,
            )
        self._open_pool(partial(model.open_preparer, ready.context_length))
        limits = store_limits(settings, policy.bytes_max)
        store = open_store(model, limits, self.inbox.put)
        told = msgspec.structs.replace(ready, store=store.name if store else "", adapters=adapters)
        self._tell_ready(told)
        return EngineCore(
            model=model,
            scheduler=Scheduler(policy, store.index if store else None),
            on_adapters=self._on_adapters,
            context_length=ready.context_length,
            store=store,
            inbox=self.inbox,
            publisher=Publisher(self._incarnation, self._outbox.put, self._outbox.depth),
            admission=BatchingWindow(settings.admission_window_s),
            counters=self.counters,
            drafting=_drafting(settings, model),
            sparse_prefill=_thinning(settings, model),
            device_memory=self._device_memory,
            watch=ProgressWatch(starved_after_s(settings.stall_timeout_s)),
        )

    def _on_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        """Note the adapters that requests may use from now on."""
        assert self._ready is not None, "the loop runs"
        self._ready = msgspec.structs.replace(self._ready, adapters=list(adapters))

    def _make_encoding_loop(self, model: EmbeddingModel) -> EmbeddingCore:
        settings = self._settings
        self._open_pool(model.open_preparer)
        self._tell_ready(ready_to_encode(self._incarnation, model.info, settings))
        target_s = STEP_SHARE * settings.inter_token_target_s
        return EmbeddingCore(
            model=model,
            pace=PrefillCostModel(target_s=target_s, tokens_max=settings.prefill_tokens),
            inbox=self.inbox,
            publisher=Publisher(self._incarnation, self._outbox.put, self._outbox.depth),
            counters=self.counters,
            device_memory=self._device_memory,
        )

    def _open_pool(self, open_preparer: Callable[[], Preparer | TextsPreparer]) -> None:
        self.pool = PreparerPool(open_preparer)
        self.pool.warm()
        self._timer.lap("preparers")

    def _tell_ready(self, ready: Ready) -> None:
        self._timer.lap("prefixes")
        log.info("ready in %.2f s: %s", self._timer.total_s, self._timer)
        self._ready = msgspec.structs.replace(ready, start_s=self._timer.rounded())
        self._outbox.put(self._ready)


def _close_store(loop: EngineCore) -> None:
    if loop.store:
        loop.store.close()


def _thinning(settings: WorkerSettings, model: Model) -> SparsePrefillQueue:
    keep = settings.sparse_prefill
    return SparsePrefillQueue(
        model.engine.importance_scorer,
        None if keep is None else SparsePrefill(keep=keep),
        is_able=model.engine.can_skip_tokens,
        target_s=settings.inter_token_target_s,
        tokens_max=settings.prefill_tokens,
    )


def _drafting(settings: WorkerSettings, model: Model) -> Speculation:
    wish = settings.speculation or ("auto" if model.engine.drafter else "off")
    return Speculation(
        is_on=wish == "auto",
        drafter=model.engine.drafter,
        target_s=settings.inter_token_target_s,
        position_cost=model.position_cost,
    )
