"""Builds the scheduler's configuration and the `Ready` message from the settings and the model."""

from __future__ import annotations

from protocol.messages import Ready
from protocol.settings.worker import WorkerSettings
from protocol.types import KVCacheQuantization
from worker.core.memory_reservations import Reservations
from worker.core.scheduler import SchedulerConfig
from worker.interfaces import Model
from worker.values import KVQuantization, ModelInfo

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
