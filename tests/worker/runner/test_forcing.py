"""Thinking budgets: reasoning is closed at exactly its limit, whatever is sampled and whenever it is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.probed_networks import engine_of
from tests.worker.runner.test_engine_parity import Job, play
from worker.runner.runner import BatchEngine
from worker.runner.sampling.state import ThinkingGuard
from worker.values import SamplingParams, ThinkingBudget

END, BREAK, CALL = 7, 8, 9
OPENINGS = [(5,), (5, 6)]


def closed(limit: ThinkingBudget, drawn: Sequence[int]) -> list[int]:
    """Reference: return the answer for the sampled tokens when every earlier token is available."""
    answer: list[int] = []
    hidden = 0 if limit.is_open else None
    ordered: list[int] = []
    for token in drawn:
        if hidden == limit.tokens:
            ordered = [*limit.closing]
        token = ordered.pop(0) if ordered else token
        answer.append(token)
        if hidden is not None:
            hidden = None if token in (limit.closing[0], limit.calling) else hidden + 1
        elif tuple(answer[-len(limit.opening) :]) == limit.opening:
            hidden = 0
    return answer


def guarded(
    limit: ThinkingBudget, drawn: Sequence[int], resumed: int = 0, *, is_prompt: bool = False
) -> list[int]:
    """Return the answer when a token is read after the next is dispatched; with `is_prompt`, before."""
    answer = [*drawn[:resumed]]
    guard = ThinkingGuard(limit, answer)
    unread: list[int] = []
    for index in range(resumed, len(drawn)):
        if is_prompt:
            for token in unread:
                guard.accept_token(token)
            unread = []
        forced = guard.forced(index)
        before = answer[-1] if answer else None
        is_forced = forced is not None and (before not in forced.unless_after)
        for token in unread:
            guard.accept_token(token)
        unread = [forced.token if is_forced and forced else drawn[index]]
        answer += unread
    return answer


limits = st.builds(
    ThinkingBudget,
    tokens=st.integers(1, 6),
    opening=st.sampled_from(OPENINGS),
    closing=st.sampled_from([(END,), (END, BREAK), (END, BREAK, 4, 5)]),
    is_open=st.booleans(),
    calling=st.sampled_from([None, CALL]),
)


@settings(max_examples=50)
@given(limits, st.lists(st.integers(4, 9), max_size=30))
def test_a_thought_is_closed_at_its_token_however_resumed(limit: ThinkingBudget, drawn: list[int]) -> None:
    expected = closed(limit, drawn)
    assert guarded(limit, drawn) == expected
    for resumed in range(len(drawn) + 1):
        guard = ThinkingGuard(limit, expected[:resumed])
        coming, rest = guard.coming(), expected[resumed:]
        assert tuple(rest[: len(coming)]) == coming[: len(rest)]
        assert bool(coming) == (guard.forced(resumed) is not None)
        for is_prompt in (False, True):
            rest = [*expected[:resumed], *drawn[resumed:]]
            assert guarded(limit, rest, resumed, is_prompt=is_prompt) == expected


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("hybrid", SamplingParams()),
        ("sliding", SamplingParams(seed=4, temperature=1.0, repetition_penalty=1.1)),
    ],
)
def test_rows_with_a_budget_close_thoughts_in_company_and_alone(name: str, sampling: SamplingParams) -> None:
    prompt = (5, 6, 7, 8)
    free = play(engine_of(name), [Job("free", prompt, 40, sampling)], random.Random(0))["free"]
    jobs = [Job("free", prompt, 40, sampling)]
    for tokens in (1, 2, 9):
        opened = ThinkingBudget(tokens, opening=(1998,), closing=(1999, 10), is_open=True)
        begun = ThinkingBudget(tokens, opening=(free[3],), closing=(1999, 10), is_open=False)
        jobs += [
            Job(f"opened{tokens}", prompt, 40, replace(sampling, thinking_budget=opened)),
            Job(f"begun{tokens}", prompt, 40, replace(sampling, thinking_budget=begun)),
        ]
    called = ThinkingBudget(5, opening=(1998,), closing=(1999, 10), is_open=True, calling=free[4])
    jobs.append(Job("called", prompt, 40, replace(sampling, thinking_budget=called)))
    together = play(engine_of(name), jobs, random.Random(1))
    assert together["free"] == free == together["called"]
    first = free.index(free[3]) + 1
    for tokens in (1, 2, 9):
        opened_answer, begun_answer = together[f"opened{tokens}"], together[f"begun{tokens}"]
        assert opened_answer[: tokens + 2] == [*free[:tokens], 1999, 10]
        assert begun_answer[: first + tokens + 2] == [*free[: first + tokens], 1999, 10]
    cuts = [(job, cut) for job in jobs[1:] for cut in range(0, 20, 4)]
    steps = _resume(engine_of(name), prompt, together, cuts)
    for number, (job, cut) in enumerate(cuts):
        rest = [tokens[str(number)] for tokens in steps]
        assert rest == together[job.name][cut : cut + 14], (job.name, cut)


def _resume(
    engine: BatchEngine,
    prompt: tuple[int, ...],
    answers: dict[str, list[int]],
    begun: Sequence[tuple[Job, int]],
) -> list[dict[str, int]]:
    """Resume rows after a part of their answers; return the next steps' tokens by index in `begun`."""
    for number, (job, cut) in enumerate(begun):
        tokens = (*prompt, *answers[job.name][:cut])
        engine.prefill({str(number): tokens[:-1]})
        engine.start(str(number), tokens, len(prompt), job.sampling)
    return [dict(engine.step().tokens) for _ in range(15)][1:]
