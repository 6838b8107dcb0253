"""What a worker keeps to, and what it tells the gateway of itself: from its settings and from its model."""

from __future__ import annotations

from protocol.messages import Ready
from protocol.workersettings import WorkerSettings
from worker.contract import Facts, Model
from worker.schedule.ledger import Ledger
from worker.schedule.scheduler import Policy


def policy_of(settings: WorkerSettings, model: Model) -> Policy:
    """What the scheduler of this model keeps to."""
    limit = settings.cache_limit_bytes
    return Policy(
        rows_max=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        inter_token_target_s=settings.inter_token_target_s,
        bytes_max=model.facts.cache_bytes_max if limit is None else limit,
        row_bytes=model.engine.row_bytes,
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


def ready_of(incarnation: str, facts: Facts, policy: Policy) -> Ready:
    """That the model can serve, and how much at once. To be asked on the model thread."""
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
    )
