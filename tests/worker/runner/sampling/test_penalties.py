"""Bias, penalties and logprobs against NumPy, token by token, and in changing batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.rules import RuleGrammar, allows
from worker.runner.sampling.sampler import Sampled, Sampler
from worker.runner.sampling.state import SamplingState
from worker.values import Logprob, SamplingParams

VOCABULARY = 130
PENALIZED = [
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=0.8),
    SamplingParams(frequency_penalty=-0.2, presence_penalty=-0.3),
    SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((9, 2.5), (4, -1.0))
    ),
    SamplingParams(repetition_penalty=1.3, logit_bias=((3, -inf), (5, -100.0), (6, 100.0))),
    SamplingParams(logit_bias=((8, -inf), (9, 1.5))),
    SamplingParams(),
]


def adjust(logits: np.ndarray, sampling: SamplingParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Apply the fields of `SamplingParams`, one token at a time."""
    result = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        result[token] += bias
    for token in {*prompt, *answer}:
        factor = sampling.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(answer):
        result[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(answer).count(token)
    return result


def logits_at(name: int, position: int) -> mx.array:
    """Return the logits of a row at a position: [vocabulary], the same in every batch."""
    return 1.5 * mx.random.normal((VOCABULARY,), key=mx.random.key(1000 * name + position))


@pytest.mark.parametrize("answered", [0, 5])
def test_greedy_rows_take_the_best_token_by_numpys_count_of_all_before(answered: int) -> None:
    prompts = [[row, 9, 9, 50] for row in range(len(PENALIZED))]
    answers = [[60, 61, 60, 62, 9][:answered] for _ in PENALIZED]
    rows = zip(PENALIZED, prompts, answers, strict=True)
    sampler = Sampler([SamplingState(sampling, prompt + answer, 4) for sampling, prompt, answer in rows])
    changed = 0
    for step in range(60):
        logits = mx.stack([logits_at(0, step % 3)] * len(PENALIZED))  # few, so that tokens repeat
        tokens = sampler(logits, [4 + answered + step] * len(PENALIZED)).tokens.tolist()
        for row, sampling in enumerate(PENALIZED):
            expected = adjust(np.array(logits[row]), sampling, prompts[row], answers[row])
            assert tokens[row] == int(expected.argmax()), (sampling, step)
            changed += tokens[row] != tokens[-1]
            answers[row].append(tokens[row])
    assert changed > 200


def test_penalties_come_before_the_filters_and_the_temperature() -> None:
    sampling = SamplingParams(
        temperature=1e4, top_k=5, presence_penalty=50.0, logit_bias=((7, 60.0), (100, -inf))
    )
    logits = mx.broadcast_to(mx.arange(VOCABULARY, dtype=mx.float32) / 10, (500, VOCABULARY))
    rows = [SamplingState(replace(sampling, seed=seed), [129, 128, 127, 3], 2) for seed in range(500)]
    tokens = set(Sampler(rows)(logits, [4] * 500).tokens.tolist())
    assert tokens == {7, 129, 128, 126, 125}  # 127 is in the answer; the prompt's tokens are not penalized


def test_a_banned_token_is_never_drawn_and_a_bias_of_minus_100_is_only_an_addition() -> None:
    logits = mx.zeros((500, 4)) + mx.array([[500.0, 450.0, 1.0, 0.0]])
    draws = [SamplingParams(seed=s, temperature=1e3, logit_bias=((0, -inf), (1, -100.0))) for s in range(500)]
    sampler = Sampler([SamplingState(sampling, [0], 1) for sampling in draws])
    assert set(sampler(logits, [1] * 500).tokens.tolist()) == {1, 2, 3}
    greedy = [SamplingParams(logit_bias=((0, bias),)) for bias in (-inf, -100.0, -10.0)]
    sampler = Sampler([SamplingState(sampling, [0], 1) for sampling in greedy])
    assert sampler(logits[:3], [1] * 3).tokens.tolist() == [1, 1, 0]


def test_tokens_beyond_the_vocabulary_are_passed_over() -> None:
    sampling = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((4, 9.0), (10**9, 9.0), (-1, 9.0))
    )
    logits = mx.array([[1.0, 3.0, 2.5, 0.0]])
    sampler = Sampler([SamplingState(sampling, [10**6, 4, 1, 2**31], 3)])
    assert [sampler(logits, [4 + step]).tokens.item() for step in range(2)] == [2, 1]


@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.bfloat16)])
def test_likelihoods_are_the_models_own_whatever_is_done_to_the_logits(dtype: mx.Dtype) -> None:
    draws = [
        SamplingParams(logprobs=0),
        SamplingParams(),
        SamplingParams(logprobs=4, temperature=2.0, top_k=3, seed=5),
        SamplingParams(logprobs=2, logit_bias=((7, 50.0),), repetition_penalty=1.5),
        SamplingParams(logprobs=VOCABULARY + 5, forced=(11,)),
    ]
    logits = mx.stack([logits_at(1, 0)] * len(draws)).astype(dtype)
    sampled = Sampler([SamplingState(sampling, [7], 1) for sampling in draws])(logits, [1] * len(draws))
    mx.eval(sampled.tokens, sampled.arrays)
    tokens, likelihoods = sampled.tokens.tolist(), sampled.likelihoods()
    assert tokens[3:] == [7, 11]
    raw = np.array(logits.astype(mx.float32)).astype(np.float64)
    logprobs = raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))
    assert sorted(likelihoods) == [0, 2, 3, 4]
    for row, likelihood in likelihoods.items():
        expected = np.argsort(-raw[row], kind="stable")[: draws[row].logprobs]
        assert likelihood.logprob == pytest.approx(logprobs[row, tokens[row]], abs=1e-5)
        assert [token for token, _ in likelihood.top] == expected.tolist()
        assert [value for _, value in likelihood.top] == pytest.approx(logprobs[row, expected], abs=1e-5)


settings_of_rows = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 0, 3, 20, 260]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6]),
    logit_bias=st.sampled_from([(), (), ((5, 4.0), (6, -inf))]),
    forced=st.sampled_from([(), (), (4,), (3, 3, 90)]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    grammar=st.sampled_from([None, None, *map(RuleGrammar, range(4))]),
)


@dataclass
class Request:
    """A row that joins at step `joins`, draws `length` tokens, and is rebuilt at `renewed`."""

    sampling: SamplingParams
    joins: int
    length: int
    renewed: int
    answer: list[int] = field(default_factory=list)
    likelihoods: list[Logprob | None] = field(default_factory=list)


requests = st.lists(
    st.builds(Request, settings_of_rows, st.integers(0, 6), st.integers(1, 9), st.integers(1, 9)),
    min_size=1,
    max_size=5,
)
PROMPT = [1, 5, 20]


def run(batch: dict[int, Request]) -> None:
    """Run all requests as an engine does: a step is dispatched before the last one is read."""
    rows: dict[int, SamplingState] = {}
    sampler = Sampler([])
    pending: tuple[dict[int, SamplingState], Sampled] | None = None
    for step in range(max(request.joins + request.length for request in batch.values())):
        active = [name for name, r in batch.items() if r.joins <= step < r.joins + r.length]
        renewed = {name for name in active if step - batch[name].joins in (0, batch[name].renewed)}
        if renewed or active != list(rows):
            sampler.release()
            if pending:
                read(batch, *pending)
            pending = None
            made = {
                n: SamplingState(batch[n].sampling, PROMPT + batch[n].answer, len(PROMPT)) for n in renewed
            }
            rows = {name: made.get(name) or rows[name] for name in active}
            sampler = Sampler(list(rows.values()))
        if not rows:
            continue
        positions = [len(PROMPT) + step - batch[name].joins for name in rows]
        logits = mx.stack([logits_at(name, at) for name, at in zip(rows, positions, strict=True)])
        drawing = sampler.begin(logits, positions)
        mx.async_eval(drawing.arrays)
        if pending:
            read(batch, *pending)
        for question in drawing.questions:
            question()
        sampled = sampler.finish(drawing)
        mx.async_eval(sampled.tokens, sampled.arrays)
        pending = rows, sampled
    if pending:
        read(batch, *pending)


def read(batch: dict[int, Request], rows: dict[int, SamplingState], sampled: Sampled) -> None:
    likelihoods = sampled.likelihoods()
    for index, (name, token) in enumerate(zip(rows, sampled.tokens.tolist(), strict=True)):
        rows[name].accept_token(token)
        batch[name].answer.append(token)
        batch[name].likelihoods.append(likelihoods.get(index))


@settings(max_examples=30, deadline=None)
@given(requests)
def test_a_row_draws_the_same_alone_and_among_rows_that_come_go_and_resume(batch: list[Request]) -> None:
    run(dict(enumerate(batch)))
    for name, request in enumerate(batch):
        alone = Request(request.sampling, 0, request.length, 100)
        run({name: alone})
        assert request.answer == alone.answer
        assert request.likelihoods == alone.likelihoods
        forced = request.sampling.forced
        assert request.answer[: len(forced)] == list(forced[: request.length])
        assert len(request.answer) == request.length
        check_grammar(request)


def check_grammar(request: Request) -> None:
    if isinstance(request.sampling.grammar, RuleGrammar):
        for index in range(len(request.sampling.forced), request.length):
            rule = allows(request.sampling.grammar.seed, request.answer[:index])
            assert rule is None or request.answer[index] % rule[0] == rule[1]
