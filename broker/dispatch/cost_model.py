"""Request cost model: seconds that requests cost a worker, by tokens and measured throughput. Pure.

It serves to compare workers of one model, not to predict latency. Prompts are assumed to be prefilled one
after another, answers to be decoded at the speed of one row. Until a worker was measured, the mean of the
model's other workers is assumed, or a default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from broker.dispatch.admission import guessed_tokens
from broker.dispatch.flight import Flight
from protocol.messages import Encode, Finished, Generate, Request

ANSWER_TOKENS = 256.0
"""Assumed length of an answer, before any has finished."""
PROMPT_TOKENS_MIN, ANSWER_TOKENS_MIN = 128, 16
"""Shorter prompts and answers are not used for measurements."""
_SLOWEST, _FASTEST = 0.1, 1e6
"""Bounds in tokens/s: the timings that a worker reports are not trusted."""
_SMOOTHING = 0.2
_RISE, _FALL = 0.3, 0.03
"""Smoothing factors for higher and lower measurements. Concurrent requests slow a request down, and nothing
makes it faster than its worker: higher values weigh more, or busy workers would be rated slow."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens/s: of prefill, and of one answer while others are decoded in the same batch."""

    prompt: float = 1000.0
    answer: float = 30.0


@dataclass(slots=True)
class ThroughputEstimate:
    """Measured throughput of one worker; None: not measured yet."""

    prompt: float | None = None
    answer: float | None = None

    def observe(self, end: Finished) -> None:
        """Add the timings of a request that this worker ran from start to finish."""
        usage, timings = end.usage, end.timings
        run = usage.prompt_tokens - usage.cached_tokens
        if run >= PROMPT_TOKENS_MIN and timings.prefill_s > 0:
            self.prompt = _smoothed(self.prompt, run / timings.prefill_s)
        if usage.completion_tokens >= ANSWER_TOKENS_MIN and timings.decode_s > 0:
            self.answer = _smoothed(self.answer, usage.completion_tokens / timings.decode_s)

    def speed(self, usual: Throughput) -> Throughput:
        """Return the throughput, with `usual` for what was not measured."""
        return Throughput(self.prompt or usual.prompt, self.answer or usual.answer)


def usual_speed(throughputs: Iterable[ThroughputEstimate]) -> Throughput:
    """Return the mean throughput of a model's workers, for one that was not measured yet."""
    throughputs = list(throughputs)
    prompts = [throughput.prompt for throughput in throughputs if throughput.prompt is not None]
    answers = [throughput.answer for throughput in throughputs if throughput.answer is not None]
    return Throughput(_mean(prompts, Throughput().prompt), _mean(answers, Throughput().answer))


def cost_s(request: Request, speed: Throughput, answer_tokens: float, *, prompt_tokens: int = 0) -> float:
    """Estimate the seconds for a request that was not started and has no cached prefix.

    `answer_tokens`: the typical length of an answer. `prompt_tokens`: of this request, 0 if not counted.
    """
    prompt_s = (prompt_tokens or guessed_tokens(request)) / speed.prompt
    return prompt_s + _answer_left(request, 0, answer_tokens) / speed.answer


def left_s(assigned: Sequence[Flight], speed: Throughput, answer_tokens: float) -> float:
    """Estimate the seconds of work left for the flights of a worker."""
    return sum(_left_s(flight, speed, answer_tokens) for flight in assigned)


def _left_s(flight: Flight, speed: Throughput, answer_tokens: float) -> float:
    prompt = 0.0
    if flight.attempt is not None and not flight.attempt.deltas:
        whole = (flight.prompt_tokens or guessed_tokens(flight.request)) + len(flight.tokens)
        prompt = whole * (1 - flight.attempt.spared)
    elif isinstance(flight.request, Encode):
        open_share = 1 - len(flight.answered) / max(1, flight.request.count)
        prompt = open_share * (flight.prompt_tokens or guessed_tokens(flight.request))
    return prompt / speed.prompt + _answer_left(flight.request, flight.progress, answer_tokens) / speed.answer


def _answer_left(request: Request, got: int, answer_tokens: float) -> float:
    """Return the expected remaining tokens: `answer_tokens` regardless of `got`, capped by `max_tokens`."""
    if not isinstance(request, Generate) or request.tokenizing is not None:
        return 0.0
    limit = answer_tokens if request.max_tokens is None else request.max_tokens - got
    return max(0.0, min(answer_tokens, limit))


def smoothed_length(before: float, end: Finished) -> float:
    """Return the moving average of the answer length, updated with this one."""
    return before + _SMOOTHING * (end.usage.completion_tokens - before)


def _smoothed(before: float | None, found: float) -> float:
    found = min(_FASTEST, max(_SLOWEST, found))
    if before is None:
        return found
    return before + (_RISE if found > before else _FALL) * (found - before)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
