"""What a worker keeps to, and what it tells the gateway of itself: from its settings and from its model."""

from __future__ import annotations

from protocol.messages import Ready
from protocol.workersettings import WorkerSettings
from worker.contract import Facts, Model
from worker.schedule.ledger import Ledger
from worker.schedule.scheduler import Policy

_IMAGES_SHARE = 1 / 8
"""Of the memory for caches. What is kept of an image of so many tokens is less than an eighth of what their
caches take, in most families: whatever image fits there fits here."""
_IMAGES_DEFAULT = 2**28


def policy_of(settings: WorkerSettings, model: Model) -> Policy:
    """What the scheduler of this model keeps to."""
    given = settings.cache_limit_bytes
    limit = model.facts.cache_bytes_max if given is None else given
    images = _image_bytes(settings, model.facts, limit)
    return Policy(
        rows_max=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        inter_token_target_s=settings.inter_token_target_s,
        bytes_max=None if limit is None else limit - images,
        row_bytes=model.engine.row_bytes,
        image_bytes_max=images,
    )


def _image_bytes(settings: WorkerSettings, facts: Facts, limit: int | None) -> int:
    """What encoded images may take of the memory for caches, at most half."""
    if not (facts.capabilities.images or facts.capabilities.videos):
        return 0
    if limit is None:
        return _IMAGES_DEFAULT if settings.image_cache is None else settings.image_cache
    return (
        round(limit * _IMAGES_SHARE)
        if settings.image_cache is None
        else min(settings.image_cache, limit // 2)
    )


def context_length(facts: Facts, policy: Policy) -> int:
    """As many tokens as a prompt and its answer can have: what the model takes or, where that is less, what
    memory holds of one row alone. To be asked on the model thread."""
    return Ledger(policy.bytes_max, policy.row_bytes).tokens_max(1 + facts.context_length)


def ready_to_encode(incarnation: str, facts: Facts, settings: WorkerSettings) -> Ready:
    """The same of a model that answers texts with numbers, and keeps nothing of them."""
    return Ready(
        incarnation=incarnation,
        model=facts.name,
        context_length=facts.context_length,
        running_max=settings.max_running,
        parameters=facts.parameters,
        capabilities=facts.capabilities,
        identity=facts.identity,
    )


def ready_of(incarnation: str, facts: Facts, policy: Policy, *, stands_in: bool = False) -> Ready:
    """That the model can serve, and how much at once. To be asked on the model thread. `stands_in`: see
    `Ready`."""
    ledger = Ledger(policy.bytes_max, policy.row_bytes)
    return Ready(
        incarnation=incarnation,
        model=facts.name,
        context_length=context_length(facts, policy),
        running_max=policy.rows_max,
        parameters=facts.parameters,
        capabilities=facts.capabilities,
        cache_bytes_max=policy.bytes_max,
        tokens_max=ledger.tokens_max(1 + policy.rows_max * facts.context_length),
        identity=facts.identity,
        plan=facts.plan,
        stands_in=stands_in,
    )
