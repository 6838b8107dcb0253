"""Speculation where it pays: simulated steps that take as long as their columns cost."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.factories import engine_request
from worker.core.drafts import LOOKUP, PAUSE_TOKENS, SOURCES
from worker.core.rows import Row
from worker.core.speculation import Speculation
from worker.values import MEDIA_KEYS, ForcedTokens, SampledToken, SamplingParams, StepOutput

DICE = random.Random(11)
FORCED = SamplingParams(forced=(0,))
"""Sampling parameters of a row with forced tokens."""
FILE = tuple(DICE.randrange(500) for _ in range(400))


def row_of(
    id: str,
    prompt: Sequence[int] = FILE,
    tokens: int = 10_000,
    *,
    speculation: bool = True,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
) -> Row:
    request = engine_request(id, prompt, sampling=sampling, max_tokens=tokens, speculation=speculation)
    length = len(prompt)
    return Row(
        request,
        (0, 0),
        prompt_group=0,
        digest=0,
        tokens=tuple(prompt),
        length=length,
        reserved_length=sys.maxsize,
    )


@dataclass
class Machine:
    """Rows with scripted answers, on an engine whose plain passes are pipelined. A pass takes a second, plus
    `column_s` for each column after the first."""

    column_s: float
    drafting: Speculation = field(init=False)
    now: float = 0.0
    widths: list[int] = field(default_factory=list)
    in_flight: bool = False
    """Whether a plain pass runs whose tokens the next step returns."""

    def __post_init__(self) -> None:
        self.drafting = Speculation(position_cost=self.column_s)

    def play(self, rows: Sequence[Row], answers: Mapping[str, Sequence[int]]) -> float:
        """Run all rows to their ends; return the time taken."""
        began, self.in_flight = self.now, False
        self.drafting.interrupt()  # by their prefill
        while going := [row for row in rows if len(row.answered) < len(answers[row.id])]:
            step = self._step(going, self.drafting.propose(going), answers)
            self.drafting.learn(step, self.now)
        return self.now - began

    def _step(
        self, rows: Sequence[Row], drafts: Mapping[str, Sequence[int]], answers: Mapping[str, Sequence[int]]
    ) -> StepOutput:
        self.now += self.in_flight
        first = {row.id: answers[row.id][len(row.answered)] for row in rows}
        if self.in_flight:
            drafts = {id: tokens[1:] for id, tokens in drafts.items() if tokens[0] == first[id]}
        drafts = {id: tokens for id, tokens in drafts.items() if tokens}
        step = StepOutput({}, {}, {}, {})
        if self.in_flight:
            step = verified(rows, {}, answers)
        self.widths.append(1 + max(map(len, drafts.values()), default=0))
        self.in_flight = not drafts
        if not drafts:
            return step
        self.now += 1 + self.column_s * (self.widths[-1] - 1)
        left = [row for row in rows if len(row.answered) < len(answers[row.id])]
        more = verified(left, drafts, answers)
        if not step.tokens:
            return more
        further = {id: [SampledToken(token), *more.further[id]] for id, token in more.tokens.items()}
        return StepOutput(step.tokens, {}, {}, {**dict.fromkeys(step.tokens, ()), **further})


def verified(
    rows: Sequence[Row], drafts: Mapping[str, Sequence[int]], answers: Mapping[str, Sequence[int]]
) -> StepOutput:
    """Return a step of these rows, which have its tokens then: their right drafts, and one behind them."""
    tokens, further = dict[str, int](), dict[str, list[SampledToken]]()
    for row in rows:
        drafted, left, right = drafts.get(row.id, ()), answers[row.id][len(row.answered) :], 0
        while right < min(len(drafted), len(left) - 1) and drafted[right] == left[right]:
            right += 1
        row.answered += left[: right + 1]
        row.length += right + 1
        tokens[row.id], further[row.id] = left[0], [SampledToken(token) for token in left[1 : right + 1]]
    return StepOutput(tokens, {}, {}, further)


def edited(file: Sequence[int], dice: random.Random, every: int = 40) -> list[int]:
    """Return the file with a few tokens replaced by three each."""
    answer: list[int] = []
    for token in file:
        answer += [dice.randrange(500, 900) for _ in range(3)] if dice.random() < 1 / every else [token]
    return answer


@pytest.mark.parametrize(("rows", "column_s", "share"), [(1, 0.05, 0.33), (8, 0.1, 0.6), (16, 0.1, 0.7)])
def test_files_that_are_rewritten_take_far_fewer_steps(rows: int, column_s: float, share: float) -> None:
    dice = random.Random(3)
    machine = Machine(column_s)
    running = [row_of(str(number)) for number in range(rows)]
    answers = {row.id: edited(FILE, dice) for row in running}
    took = machine.play(running, answers)
    assert took < share * max(map(len, answers.values()))
    assert machine.drafting.accepted > machine.drafting.rejected


@pytest.mark.parametrize("forced", [(), (1, 2, 3, 4)])
def test_where_every_column_costs_a_step_nothing_is_drafted(forced: tuple[int, ...]) -> None:
    row = row_of("a", FILE * 2 + FILE[:3], sampling=FORCED)
    drafting = Speculation(position_cost=1.0)
    assert drafting.propose([row], lambda id, most: ForcedTokens(forced, len(forced))) == {}


def test_draft_does_not_exceed_the_remaining_tokens_nor_the_reserved_memory() -> None:
    drafting, row = Speculation(), row_of("a", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], tokens=3)
    assert drafting.propose([row]) == {"a": (4, 5)}
    row.answered, row.length = [4, 5], row.length + 2
    assert drafting.propose([row]) == {}
    row = row_of("b", [*range(30), *range(20)])
    row.reserved_length = row.length + 4
    assert drafting.propose([row]) == {"b": (20, 21, 22)}


def test_in_a_prompt_with_images_its_text_is_looked_up() -> None:
    row = row_of("a", [7, 1, 2, 3, 4, 5, MEDIA_KEYS + 8, MEDIA_KEYS + 9, 6, 1, 2, 3])
    assert Speculation().propose([row]) == {"a": (4, 5)}, "image keys are never drafted"


def test_it_is_off_for_all_or_for_who_asks() -> None:
    def never(id: str, most: int) -> ForcedTokens:
        raise AssertionError(id)

    row, without = (row_of("a", FILE * 2 + FILE[:3], speculation=wish) for wish in (True, False))
    assert Speculation(is_on=False).propose([row], never) == {}
    assert Speculation(is_on=False).status() is None
    assert Speculation().propose([without], never) == {}
    assert len(Speculation().propose([row])["a"]) == SOURCES[LOOKUP].length


def test_more_rows_than_were_measured_are_not_looked_up_for() -> None:
    most = SOURCES[LOOKUP].rows
    rows = [row_of(str(number), FILE * 2 + FILE[:3]) for number in range(most + 1)]
    assert len(Speculation(position_cost=0.0).propose(rows[:most])) == most
    assert Speculation(position_cost=0.0).propose(rows) == {}


def test_certain_tokens_are_drafted_up_to_the_room_instead_of_others() -> None:
    row = row_of("a", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], sampling=FORCED)
    drafting = Speculation(position_cost=0.1)
    long = tuple(range(20, 32))
    assert drafting.propose([row], lambda id, most: ForcedTokens(long[:most], len(long))) == {"a": long}
    assert drafting.propose([row], lambda id, most: ForcedTokens((8,), 1)) == {"a": (8,)}
    assert drafting.propose([row], lambda id, most: ForcedTokens((8,)))["a"][0] == 4
    assert drafting.propose([row], lambda id, most: ForcedTokens())["a"][0] == 4


def test_likely_tokens_that_do_not_come_are_left_out_for_a_while() -> None:
    drafting, row = Speculation(position_cost=0.0), row_of("a", [1, 2], sampling=FORCED)
    widths = []
    for step in range(2 * PAUSE_TOKENS):
        drafted = drafting.propose([row], lambda id, most: ForcedTokens((7, 8, 9), 1))
        widths.append(len(drafted["a"]))
        # The certain draft is right, the likely ones never are.
        drafting.learn(StepOutput({"a": 7}, {}, {}, {"a": [SampledToken(0)]}), float(step))
        row.answered += [7, 0]
    assert widths[0] == 3
    assert widths.count(1) >= PAUSE_TOKENS


@pytest.mark.parametrize(
    ("kind", "column_s", "rows"),
    [
        ("right", 0.05, 1),
        ("right", 0.25, 16),
        ("wrong", 0.05, 16),
        ("wrong", 1.0, 1),
        ("by turns", 0.05, 4),
        ("by turns", 0.25, 1),
        ("by turns", 1.0, 16),
        ("new", 0.25, 4),
    ],
)
def test_short_answers_lose_little_from_the_first_on(kind: str, column_s: float, rows: int) -> None:
    dice = random.Random(rows)
    machine = Machine(column_s)
    for turn in range(3):
        answers = {f"{turn} {row}": [dice.randrange(10**6) for _ in range(80)] for row in range(rows)}
        running = [row_of(id, prompt_for(kind, answer)) for id, answer in answers.items()]
        assert machine.play(running, answers) <= 1.05 * 80


def prompt_for(kind: str, answer: Sequence[int]) -> Sequence[int]:
    """Return a prompt in which n-gram drafts are `right`, `wrong`, both `by turns`, or not found."""
    match kind:
        case "right":
            return answer
        case "wrong":
            return [token for end in range(3, 80) for token in (*answer[end - 3 : end], -1, -2)]
        case "by turns":
            return [token for end in range(3, 80, 6) for token in (*answer[end - 3 : end + 3], -1, -2)]
    return FILE


@pytest.mark.parametrize(
    ("kinds", "column_s", "rows"), [(("right", "new"), 0.25, 16), (("by turns", "new"), 0.05, 16)]
)
def test_rows_with_drafts_do_not_slow_others(kinds: Sequence[str], column_s: float, rows: int) -> None:
    dice = random.Random(rows)
    machine = Machine(column_s)
    answers = {str(row): [dice.randrange(10**6) for _ in range(80)] for row in range(rows)}
    prompts = {id: prompt_for(kinds[int(id) % len(kinds)], answer) for id, answer in answers.items()}
    assert machine.play([row_of(id, prompt) for id, prompt in prompts.items()], answers) < 1.06 * 80


@pytest.mark.parametrize("rows", [1, 16])
def test_short_answers_gain_where_columns_are_cheap(rows: int) -> None:
    dice = random.Random(rows)
    machine = Machine(0.05)
    answers = {str(row): [dice.randrange(10**6) for _ in range(80)] for row in range(rows)}
    took = machine.play([row_of(id, answer) for id, answer in answers.items()], answers)
    assert took < 0.25 * 80
