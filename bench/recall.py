"""Accuracy of recall under sparse prefill, by the method that chooses the tokens.

    python -m bench.recall [--tokens 16000] [--facts 64] [--prompts 7] [--questions 4] [--keep 0.3,0.1]

Facts are spread over a prompt (`bench.facts`), and a model that recalls all of them (`bench.recall_model`) is
asked about one: plain facts, and facts that refer to another. Token importance is scored by the model itself,
or by a smaller one with other embeddings and a less confident distribution. Reported are correct answers, and
how often all tokens of the facts were kept.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from bench.facts import END, FACT_TOKENS, FactPrompt, Question
from bench.importance_scores import by_attention, by_mask
from bench.recall_model import LARGE, SMALL, make_recaller
from bench.sparse import Side
from bench.timing import print_table
from worker.core.rows import Span
from worker.core.sparse_prefill import least
from worker.runner.token_importance import score_tokens

Way = Callable[[Any, Any, int], mx.array]
WAYS: dict[str, Way] = {"values": score_tokens, "attention": by_attention, "mask": by_mask}
ANSWER_TOKENS = 8
SURE = 1.96
"""Standard deviations of a normal distribution that cover 95% of it."""


class Count:
    """Counts of questions: correct answers, and those with all facts prefilled."""

    def __init__(self) -> None:
        self.asked = self.right = self.whole = 0

    def add(self, right: bool, whole: bool) -> None:
        self.asked += 1
        self.right += right
        self.whole += whole


def copied(side: Side, tokens: Sequence[int]) -> Side:
    """Return a copy of `side` that has also prefilled `tokens`."""
    other = Side(side.network)
    other.caches = copy.deepcopy(side.caches)
    other.read(tokens)
    return other


def is_right(side: Side, question: Question) -> bool:
    """Return whether `side`, which has prefilled all but the last token of the question, answers
    correctly."""
    return side.say(question.tokens[-1], ANSWER_TOKENS, [END]) == question.answer


def weights(weighers: dict[str, Side], question: Question, seed: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the importance of all tokens but the last, for each scorer. `weighers` have prefilled the prompt
    before the question."""
    count = weighers["itself"].caches[-1].offset + 1
    for name, side in weighers.items():
        caches = copied(side, question.tokens[:-1]).caches
        for way, told in WAYS.items():
            found: Any = told(side.network, caches, question.tokens[-1]).tolist()
            yield f"{name}, by {way}", found
    sampling = random.Random(seed)
    yield "at random", [sampling.random() for _ in range(count)]
    yield "the last ones", list(map(float, range(count)))


def is_kept(places: Sequence[int], spans: Sequence[Span]) -> bool:
    """Return whether none of the facts at `places` is skipped."""
    return all(last <= place or place + FACT_TOKENS <= first for place in places for first, last in spans)


def measure(
    networks: dict[str, Any],
    prompt: FactPrompt,
    questions: Sequence[Question],
    keeps: Sequence[float],
    seed: int,
) -> Iterator[tuple[Question, str, float, bool, bool]]:
    """Yield for each question: the scorer, the share of tokens kept, whether the answer was correct, and
    whether the facts were kept."""
    weighers = {name: Side(network) for name, network in networks.items()}
    for side in weighers.values():
        side.read(prompt.tokens)
    for number, question in enumerate(questions):
        whole = copied(weighers["itself"], question.tokens[:-1])
        yield question, "all tokens", 1.0, is_right(whole, question), True
        for who, found in weights(weighers, question, seed * 1000 + number):
            for keep in keeps:
                spans = least(found, keep, 0)
                side = Side(networks["itself"])
                side.read([*prompt.tokens, *question.tokens[:-1]], spans)
                yield question, who, keep, is_right(side, question), is_kept(question.places, spans)


def interval(hits: int, asked: int) -> str:
    """Return a share with its 95% interval (Wilson's)."""
    share, squared = hits / asked, SURE**2
    middle = (share + squared / (2 * asked)) / (1 + squared / asked)
    spread = SURE * math.sqrt(share * (1 - share) / asked + squared / (4 * asked**2)) / (1 + squared / asked)
    return f"{share:.0%} ({middle - spread:.0%}-{middle + spread:.0%})"


def recaller(name: str, seed: int, **changes: Any) -> Any:
    """Return a network. `changes`: of its shape."""
    shape = {"itself": LARGE, "a smaller one": SMALL}[name]
    with tempfile.TemporaryDirectory() as folder:
        return load_model(make_recaller(Path(folder), replace(shape, **changes), seed))[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--facts", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--questions", type=int, default=4, help="of each kind, for each prompt")
    parser.add_argument("--keep", default="0.3,0.1")
    parser.add_argument(
        "--sharpness", type=float, default=LARGE.sharpness, help="attention score of a matching token"
    )
    asked = parser.parse_args(arguments)
    names = ("itself", "a smaller one")
    networks = {name: recaller(name, seed, sharpness=asked.sharpness) for seed, name in enumerate(names)}
    keeps = list(map(float, asked.keep.split(",")))
    counts: dict[tuple[bool, float, str], Count] = {}
    for seed in range(asked.prompts):
        prompt = FactPrompt(asked.tokens, asked.facts, seed)
        questions = [
            question
            for leading in (False, True)
            for question in prompt.questions(asked.questions, leading=leading)
        ]
        for question, who, keep, *outcome in measure(networks, prompt, questions, keeps, seed):
            counts.setdefault((len(question.places) > 1, keep, who), Count()).add(*outcome)
        print(f"{seed + 1} of {asked.prompts}", flush=True)
    print_counts(counts, f"{asked.tokens:,} tokens, {asked.facts} facts")


def print_counts(counts: dict[tuple[bool, float, str], Count], title: str) -> None:
    """Print a table for each kind of question."""
    for kind, name in ((False, "plain facts"), (True, "facts that lead to others")):
        rows = [
            [f"{keep:.0%}", who, interval(each.right, each.asked), interval(each.whole, each.asked)]
            for (leading, keep, who), each in sorted(counts.items(), key=lambda item: -item[0][1])
            if leading == kind
        ]
        total = counts[kind, 1.0, "all tokens"].asked
        columns = ["prefilled", "chosen by", "correct", "facts prefilled"]
        print_table(f"{title}, {name}", columns, rows, f"{total} questions; 95% intervals")


if __name__ == "__main__":
    main()
