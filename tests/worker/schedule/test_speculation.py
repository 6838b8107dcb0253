"""Speculation where it pays: simulated steps that take as long as their columns cost."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.factories import engine_request
from worker.contract.engine import SampledToken, SamplingParams, StepOutput
from worker.contract.guides import ForcedTokens
from worker.contract.images import MEDIA_KEYS
from worker.schedule import ngram_proposer
from worker.schedule.draft_length import DRAFTED_MAX
from worker.schedule.ngram_proposer import Draft
from worker.schedule.rows import Row
from worker.schedule.speculation import Speculation
from worker.schedule.step_cost import DOUBTS, HOPELESS_STEPS, LAPS_MIN

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


def measured(*, is_on: bool = True) -> Speculation:
    """Return a policy with measured costs of plain steps of one row and of verify columns."""
    drafting = Speculation(is_on=is_on, position_cost=0.25)
    for on_step_end in range(LAPS_MIN + 1):
        drafting.propose([])
        drafting.learn(StepOutput({}, {}), 1, float(on_step_end))
    return drafting


def trusting(row: Row) -> Speculation:
    """Return the same policy, with accepted n-gram drafts for `row`."""
    drafting = measured()
    drafting.propose([row])
    for matched in (3, 5, 8, 16):
        drafting._sources[row.id].learn(Draft((1,) * 8, matched), 8, 8)
    return drafting


@dataclass
class Machine:
    """Rows with scripted answers, on an engine whose plain passes are pipelined. A pass takes a second, plus
    `column_s` for each column after the first."""

    drafting: Speculation
    column_s: float
    now: float = 0.0
    widths: list[int] = field(default_factory=list)
    in_flight: bool = False
    """Whether a plain pass runs whose tokens the next step returns."""

    def play(self, rows: Sequence[Row], answers: Mapping[str, Sequence[int]]) -> float:
        """Run all rows to their ends; return the time taken."""
        began, self.in_flight = self.now, False
        self.drafting.interrupt()  # by their prefill
        while going := [row for row in rows if len(row.answered) < len(answers[row.id])]:
            step = self._step(going, self.drafting.propose(going), answers)
            self.drafting.learn(step, len(going), self.now)
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


@pytest.mark.parametrize("rows", [1, 8])
def test_files_that_are_rewritten_take_far_fewer_steps(rows: int) -> None:
    dice = random.Random(3)
    machine = Machine(Speculation(), column_s=0.1)
    running = [row_of(str(number)) for number in range(rows)]
    answers = {row.id: edited(FILE, dice) for row in running}
    took = machine.play(running, answers)
    assert took < 0.6 * max(map(len, answers.values()))
    assert machine.drafting.accepted > machine.drafting.rejected


def test_where_every_column_costs_a_step_drafts_end_by_themselves() -> None:
    dice = random.Random(5)
    machine = Machine(Speculation(), column_s=1.0)
    for number in range(6):
        machine.play([row_of(str(number))], {str(number): edited(FILE, dice)})
    assert max(machine.widths[-300:]) == 1
    assert machine.now < 1.05 * len(machine.widths) + 60


def test_draft_does_not_exceed_the_remaining_tokens_nor_the_reserved_memory() -> None:
    row = row_of("a", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], tokens=3)
    drafting = trusting(row)
    assert drafting.propose([row]) == {"a": (4, 5)}
    row.answered, row.length = [4, 5], row.length + 2
    assert drafting.propose([row]) == {}
    row = row_of("a", [*range(30), *range(20)])
    row.reserved_length = row.length + 4
    assert trusting(row).propose([row]) == {"a": (20, 21, 22)}


def test_in_a_prompt_with_images_its_text_is_looked_up() -> None:
    row = row_of("a", [7, 1, 2, 3, 4, 5, MEDIA_KEYS + 8, MEDIA_KEYS + 9, 6, 1, 2, 3])
    assert trusting(row).propose([row]) == {"a": (4, 5)}, "image keys are never drafted"


def test_it_is_off_for_all_or_for_who_asks() -> None:
    def never(id: str, most: int) -> ForcedTokens:
        raise AssertionError(id)

    assert measured(is_on=False).propose([row_of("a", FILE * 2)], never) == {}
    assert measured().propose([row_of("a", FILE * 2, speculation=False)], never) == {}
    row = row_of("a", FILE * 2 + FILE[:3])
    assert len(trusting(row).propose([row])["a"]) <= DRAFTED_MAX


def test_forced_tokens_take_precedence_over_ngram_drafts() -> None:
    row = row_of("a", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], sampling=FORCED)
    drafting = trusting(row)
    assert drafting.propose([row], lambda id, most: ForcedTokens((8, 9, 10, 11), 4)) == {"a": (8, 9, 10, 11)}
    assert drafting.propose([row], lambda id, most: ForcedTokens((8,)))["a"][0] == 4
    assert drafting.propose([row], lambda id, most: ForcedTokens())["a"][0] == 4


def test_forced_tokens_do_not_raise_the_acceptance_rate_of_likely_ones() -> None:
    drafting, row = measured(), row_of("a", [1, 2], sampling=FORCED)
    for on_step_end in range(40):
        drafted = drafting.propose([row], lambda id, most: ForcedTokens((7, 8, 9), 1))
        # The certain draft is right, the likely ones never are.
        further = {"a": [SampledToken(0)]} if drafted else {}
        drafting.learn(StepOutput({"a": 7}, {}, {}, further), 1, 10.0 + on_step_end)
    assert drafting.propose([row], lambda id, most: ForcedTokens((7, 8, 9), 3))["a"][:2] == (7, 8)
    assert drafting._sources["a"].acceptance(ngram_proposer.FORCED) < 0.2


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
def test_short_answers_lose_nothing_from_the_first_on(kind: str, column_s: float, rows: int) -> None:
    dice = random.Random(rows)
    machine = Machine(Speculation(position_cost=column_s), column_s)
    for turn in range(3):
        answers = {f"{turn} {row}": [dice.randrange(10**6) for _ in range(80)] for row in range(rows)}
        running = [row_of(id, prompt_for(kind, answer)) for id, answer in answers.items()]
        assert machine.play(running, answers) <= 1.03 * 80


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
    machine = Machine(Speculation(position_cost=column_s), column_s)
    answers = {str(row): [dice.randrange(10**6) for _ in range(80)] for row in range(rows)}
    prompts = {id: prompt_for(kinds[int(id) % len(kinds)], answer) for id, answer in answers.items()}
    assert machine.play([row_of(id, prompt) for id, prompt in prompts.items()], answers) < 1.06 * 80


@pytest.mark.parametrize("rows", [1, 16])
def test_short_answers_gain_where_columns_are_cheap(rows: int) -> None:
    dice = random.Random(rows)
    machine = Machine(Speculation(position_cost=0.05), 0.05)
    answers = {str(row): [dice.randrange(10**6) for _ in range(80)] for row in range(rows)}
    took = machine.play([row_of(id, answer) for id, answer in answers.items()], answers)
    assert took < 0.25 * 80


@pytest.mark.parametrize("told", [0.05, None])
def test_columns_that_are_dearer_than_was_told_are_soon_known(told: float | None) -> None:
    machine = Machine(Speculation(position_cost=told), column_s=1.0)
    answer = FILE[:80]
    assert machine.play([row_of("a", prompt_for("by turns", answer))], {"a": answer}) < 1.1 * 80
    machine.play([row_of("b", prompt_for("by turns", answer))], {"b": answer})
    assert max(machine.widths[-60:]) == 1


@pytest.mark.parametrize("column_s", [0.05, 1.0])
def test_a_price_that_was_measured_beside_other_work_is_not_believed_for_ever(column_s: float) -> None:
    machine, file = Machine(Speculation(position_cost=2.0), column_s), FILE[:80]
    for number in range(2 * HOPELESS_STEPS // len(file)):
        id = str(number)
        took = machine.play([row_of(id, prompt_for("right", file))], {id: file})
        machine.drafting.drop(id)
    drafted = sum(width > 1 for width in machine.widths)
    if column_s < 1:
        assert took < 0.5 * len(file)
    else:
        assert took <= 1.05 * len(file)
        assert 0 < drafted < 0.001 * len(machine.widths) + DOUBTS
