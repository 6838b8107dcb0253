"""What requests cost a worker, in seconds, by their tokens and by how fast it was found to be. Pure.

It compares workers of one model; it promises nobody anything. Tokens of a prompt are taken to be run one
after another, those of an answer at the speed of one row. Where nothing was measured yet, the others' speed
is assumed, or any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from broker.dispatch.admission import guessed_tokens
from broker.dispatch.flight import Flight
from protocol.messages import Encode, Finished, Generate, Request

ANSWER_TOKENS = 256.0
"""Of an answer, before any has ended."""
PROMPT_TOKENS_MIN, ANSWER_TOKENS_MIN = 128, 16
"""From shorter ones no speed is measured."""
_SLOWEST, _FASTEST = 0.1, 1e6
"""Tokens a second: what a worker says of its time may be any number."""
_SMOOTHING = 0.2
_RISE, _FALL = 0.3, 0.03
"""Of a speed, towards what was found. Others beside a request slow it, and nothing makes it quicker than its
worker is: so what is found on a quiet one counts for more, or whoever is busy would be taken for slow."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second: of prompts, and of one answer among those that run beside it."""

    prompt: float = 1000.0
    answer: float = 30.0


@dataclass(slots=True)
class Pace:
    """What was measured of one worker; None: nothing yet."""

    prompt: float | None = None
    answer: float | None = None

    def observe(self, end: Finished) -> None:
        """A request that it ran from its beginning to this end."""
        usage, timings = end.usage, end.timings
        run = usage.prompt_tokens - usage.cached_tokens
        if run >= PROMPT_TOKENS_MIN and timings.prefill_s > 0:
            self.prompt = _smoothed(self.prompt, run / timings.prefill_s)
        if usage.completion_tokens >= ANSWER_TOKENS_MIN and timings.decode_s > 0:
            self.answer = _smoothed(self.answer, usage.completion_tokens / timings.decode_s)

    def speed(self, usual: Speed) -> Speed:
        """`usual`: what is assumed of what was not measured."""
        return Speed(self.prompt or usual.prompt, self.answer or usual.answer)


def usual_speed(paces: Iterable[Pace]) -> Speed:
    """What can be assumed of another worker of the same model."""
    paces = list(paces)
    prompts = [pace.prompt for pace in paces if pace.prompt is not None]
    answers = [pace.answer for pace in paces if pace.answer is not None]
    return Speed(_mean(prompts, Speed().prompt), _mean(answers, Speed().answer))


def cost_s(request: Request, speed: Speed, answer_tokens: float, *, prompt_tokens: int = 0) -> float:
    """Of a request that no worker has begun and nothing is stored of. `answer_tokens`: as many as most
    answers have; `prompt_tokens`: of its own, if they were counted."""
    prompt_s = (prompt_tokens or guessed_tokens(request)) / speed.prompt
    return prompt_s + _answer_left(request, 0, answer_tokens) / speed.answer


def left_s(aboard: Sequence[Flight], speed: Speed, answer_tokens: float) -> float:
    """What is left to do for those aboard a worker."""
    return sum(_left_s(flight, speed, answer_tokens) for flight in aboard)


def _left_s(flight: Flight, speed: Speed, answer_tokens: float) -> float:
    prompt = 0.0
    if flight.leg is not None and not flight.leg.deltas:
        whole = (flight.prompt_tokens or guessed_tokens(flight.request)) + len(flight.tokens)
        prompt = whole * (1 - flight.leg.spared)
    elif isinstance(flight.request, Encode):
        open_share = 1 - len(flight.answered) / max(1, flight.request.count)
        prompt = open_share * (flight.prompt_tokens or guessed_tokens(flight.request))
    return prompt / speed.prompt + _answer_left(flight.request, flight.progress, answer_tokens) / speed.answer


def _answer_left(request: Request, got: int, answer_tokens: float) -> float:
    """Nobody knows when an answer ends; one that has got far is as far from its end as any."""
    if not isinstance(request, Generate) or request.tokenizing is not None:
        return 0.0
    limit = answer_tokens if request.max_tokens is None else request.max_tokens - got
    return max(0.0, min(answer_tokens, limit))


def smoothed_length(before: float, end: Finished) -> float:
    """How many tokens an answer has, as far as this one tells."""
    return before + _SMOOTHING * (end.usage.completion_tokens - before)


def _smoothed(before: float | None, found: float) -> float:
    found = min(_FASTEST, max(_SLOWEST, found))
    if before is None:
        return found
    return before + (_RISE if found > before else _FALL) * (found - before)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
