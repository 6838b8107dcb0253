"""Thoughts with a budget: closed at exactly their token, whatever is drawn, whenever it is read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine.test_engine_parity import MODELS, Job, engine_of, play
from worker.contract import Draw, ThoughtLimit
from worker.engine.engine import BatchEngine
from worker.engine.sampling.forcing import ThoughtGuard

END, BREAK, CALL = 7, 8, 9
OPENINGS = [(5,), (5, 6)]


def closed(limit: ThoughtLimit, drawn: Sequence[int]) -> list[int]:
    """What becomes of the drawn tokens, by one who knows every token before."""
    answer: list[int] = []
    thought = 0 if limit.is_open else None
    ordered: list[int] = []
    for token in drawn:
        if thought == limit.tokens:
            ordered = [*limit.closing]
        token = ordered.pop(0) if ordered else token
        answer.append(token)
        if thought is not None:
            thought = None if token in (limit.closing[0], limit.calling) else thought + 1
        elif tuple(answer[-len(limit.opening) :]) == limit.opening:
            thought = 0
    return answer


def guarded(
    limit: ThoughtLimit, drawn: Sequence[int], resumed: int = 0, *, is_prompt: bool = False
) -> list[int]:
    """What becomes of them where a token is read only when the next one has been set out to be drawn; or
    where that is prompt, before."""
    answer = [*drawn[:resumed]]
    guard = ThoughtGuard(limit, answer)
    unread: list[int] = []
    for index in range(resumed, len(drawn)):
        if is_prompt:
            for token in unread:
                guard.saw(token)
            unread = []
        forced = guard.forced(index)
        before = answer[-1] if answer else None
        is_forced = forced is not None and (before not in forced.unless_after)
        for token in unread:
            guard.saw(token)
        unread = [forced.token if is_forced and forced else drawn[index]]
        answer += unread
    return answer


limits = st.builds(
    ThoughtLimit,
    tokens=st.integers(1, 6),
    opening=st.sampled_from(OPENINGS),
    closing=st.sampled_from([(END,), (END, BREAK), (END, BREAK, 4, 5)]),
    is_open=st.booleans(),
    calling=st.sampled_from([None, CALL]),
)


@given(limits, st.lists(st.integers(4, 9), max_size=40))
def test_a_thought_is_closed_at_its_token_wherever_it_began_and_wherever_the_answer_is_resumed(
    limit: ThoughtLimit, drawn: list[int]
) -> None:
    expected = closed(limit, drawn)
    assert guarded(limit, drawn) == expected
    for resumed in range(len(drawn) + 1):
        for is_prompt in (False, True):
            rest = [*expected[:resumed], *drawn[resumed:]]
            assert guarded(limit, rest, resumed, is_prompt=is_prompt) == expected


def test_a_thought_that_ends_with_its_last_token_is_not_ended_twice() -> None:
    limit = ThoughtLimit(tokens=3, opening=(5,), closing=(END, BREAK), is_open=True)
    assert guarded(limit, [4, 4, END, 9, 9, 9]) == [4, 4, END, 9, 9, 9]
    assert guarded(limit, [4, 4, 4, 9, 9, 9]) == [4, 4, 4, END, BREAK, 9]


def test_a_call_that_begins_in_a_thought_is_not_broken_by_its_end() -> None:
    limit = ThoughtLimit(tokens=3, opening=(5,), closing=(END, BREAK), is_open=True, calling=CALL)
    for drawn in ([CALL, 4, 4, 4, 4, 4], [4, 4, CALL, 4, 4, 4]):
        assert guarded(limit, drawn) == drawn
    assert guarded(limit, [4, 4, 4, CALL, 4, 4]) == [4, 4, 4, END, BREAK, 4]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draw", [Draw(), Draw(seed=4, temperature=1.0, repetition_penalty=1.1)])
def test_rows_with_a_budget_close_their_thoughts_in_company_and_alone(name: str, draw: Draw) -> None:
    prompt = (5, 6, 7, 8)
    free = play(engine_of(name), [Job("free", prompt, 40, draw)], random.Random(0))["free"]
    jobs = [Job("free", prompt, 40, draw)]
    for tokens in (1, 2, 9):
        opened = ThoughtLimit(tokens, opening=(1998,), closing=(1999, 10), is_open=True)
        begun = ThoughtLimit(tokens, opening=(free[3],), closing=(1999, 10), is_open=False)
        jobs += [
            Job(f"opened{tokens}", prompt, 40, _with(draw, opened)),
            Job(f"begun{tokens}", prompt, 40, _with(draw, begun)),
        ]
    called = ThoughtLimit(5, opening=(1998,), closing=(1999, 10), is_open=True, calling=free[4])
    jobs.append(Job("called", prompt, 40, _with(draw, called)))
    together = play(engine_of(name), jobs, random.Random(1))
    assert together["free"] == free == together["called"]
    first = free.index(free[3]) + 1
    for tokens in (1, 2, 9):
        opened_answer, begun_answer = together[f"opened{tokens}"], together[f"begun{tokens}"]
        assert opened_answer[: tokens + 2] == [*free[:tokens], 1999, 10]
        assert begun_answer[: first + tokens + 2] == [*free[: first + tokens], 1999, 10]
    cuts = [(job, cut) for job in jobs[1:] for cut in range(0, 20, 3)]
    alone = [[each] for each in cuts[::8]]  # of each job at another place
    for begun in (cuts, *alone):
        steps = _resume(engine_of(name), prompt, together, begun)
        for number, (job, cut) in enumerate(begun):
            rest = [tokens[str(number)] for tokens in steps]
            assert rest == together[job.name][cut : cut + 14], (job.name, cut, len(begun))


def _resume(
    engine: BatchEngine,
    prompt: tuple[int, ...],
    answers: dict[str, list[int]],
    begun: Sequence[tuple[Job, int]],
) -> list[dict[str, int]]:
    """What rows say next that have said so many tokens of their answers, by the number of each."""
    for number, (job, cut) in enumerate(begun):
        tokens = (*prompt, *answers[job.name][:cut])
        engine.prefill({str(number): tokens[:-1]})
        engine.start(str(number), tokens, len(prompt), job.draw)
    return [dict(engine.step().tokens) for _ in range(15)][1:]


def _with(draw: Draw, limit: ThoughtLimit) -> Draw:
    return Draw(
        seed=draw.seed,
        temperature=draw.temperature,
        repetition_penalty=draw.repetition_penalty,
        thoughts=limit,
    )


@given(limits, st.lists(st.integers(4, 9), max_size=40))
def test_what_is_coming_of_a_closing_is_what_is_forced(limit: ThoughtLimit, drawn: list[int]) -> None:
    answer = closed(limit, drawn)
    for index in range(len(answer)):
        guard = ThoughtGuard(limit, answer[:index])
        coming = guard.coming()
        rest = answer[index:]
        assert tuple(rest[: len(coming)]) == coming[: len(rest)]
        assert bool(coming) == (guard.forced(index) is not None)
