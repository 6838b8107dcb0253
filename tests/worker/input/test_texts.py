"""Texts, token ids and pairs on their way to tokens, and refusals."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoTokenizer

from protocol.conversation import pack
from protocol.errors import Code, RequestError
from protocol.messages import Rank
from tests import factories
from tests.models.fixtures import model_folder
from worker.input.texts import EmbedPreparer, JudgePreparer, PairPreparer, TextRules
from worker.values import PreparedTexts

RULES = TextRules(context_length=32, vocabulary=1200, width=48, shorter_sizes=frozenset({16, 32}))
LONG = "the old house near the river " * 20


@cache
def tokenizer(name: str = "bert-embedder") -> Any:
    return AutoTokenizer.from_pretrained(model_folder(name))


def embed(texts: list[Any], rules: TextRules = RULES, **more: Any) -> PreparedTexts:
    return EmbedPreparer(tokenizer(), rules).prepare(factories.embed(texts, **more), ())


def rank(documents: list[Any], query: str = "a river", **more: Any) -> PreparedTexts:
    counted = {"texts": pack(documents), "count": len(documents), "source": "documents"}
    request = Rank(incarnation="g", id="a", query=query, **counted)
    return PairPreparer(tokenizer("bert-reranker"), RULES).prepare(replace(request, **more), ())


def refusal(texts: list[Any], rules: TextRules = RULES, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        embed(texts, rules, **more)
    return caught.value


def test_texts_have_their_marks_and_ids_are_taken_as_they_are() -> None:
    known = embed(["the house", [7, 8, 9]], answered=[1], priority=3, deadline_s=2.0)
    [text, ids] = known.texts
    assert list(text.tokens) == tokenizer()("the house")["input_ids"]
    assert text.tokens[0] == tokenizer().cls_token_id
    assert ids.tokens == (7, 8, 9)
    assert (known.id, known.answered, known.priority, known.deadline_s) == ("a", frozenset({1}), 3, 2.0)


def test_a_long_text_is_refused_by_name_and_with_both_numbers() -> None:
    tokens = len(tokenizer()(LONG)["input_ids"])
    error = refusal(["a", LONG])
    assert (error.code, error.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "input[1]")
    assert "maximum context length is 32 tokens" in error.message
    assert f"resulted in {tokens} tokens" in error.message
    assert refusal([[5] * 33]).param == "input"


@pytest.mark.parametrize(("most", "kept"), [(10, 10), (2**31 - 1, 32)])
def test_long_texts_are_truncated_on_request(most: int, kept: int) -> None:
    [text, ids, short] = embed([LONG, list(range(1, 41)), "a"], tokens_max=most).texts
    assert list(text.tokens) == tokenizer()(LONG, truncation=True, max_length=kept)["input_ids"]
    assert text.tokens[-1] == tokenizer().sep_token_id
    assert ids.tokens == tuple(range(1, kept + 1))
    assert len(short.tokens) == 3


def test_dimensions_are_all_or_those_that_the_model_was_trained_for() -> None:
    for whole in (None, 48):
        assert embed(["a"], dimensions=whole).texts[0].dimensions is None
    assert embed(["a"], dimensions=16).texts[0].dimensions == 16
    anything = TextRules(32, 1200, 48, shorter_sizes=None)
    assert embed(["a"], anything, dimensions=7).texts[0].dimensions == 7
    for rules, wrong in ((RULES, 17), (anything, 49), (TextRules(32, 1200, 48), 16)):
        error = refusal(["a"], rules, dimensions=wrong)
        assert (error.code, error.param) == (Code.INVALID_REQUEST, "dimensions")
        assert "48" in error.message


def test_a_classifier_takes_no_instruction_and_no_ids() -> None:
    with pytest.raises(RequestError) as caught:
        rank(["a"], instruction="Find it.")
    assert caught.value.param == "instruction"
    with pytest.raises(RequestError) as caught:
        rank(["a", [1]])
    assert caught.value.param == "documents[1]"


def judge(query: str, **more: Any) -> PreparedTexts:
    request = Rank(incarnation="g", id="a", texts=pack(["station " * 900]), count=1, query=query)
    rules = TextRules(context_length=256, vocabulary=2048, width=1)
    return JudgePreparer(tokenizer("qwen3-reranker"), rules).prepare(replace(request, **more), ())


def test_a_long_document_is_truncated_and_its_query_is_not() -> None:
    [text] = judge("where?").texts
    assert len(text.tokens) == 256
    read = tokenizer("qwen3-reranker").decode(text.tokens)
    assert "<Query>: where?" in read
    assert read.endswith("<think>\n\n</think>\n\n")
    [pair] = rank([LONG], query="river near the house the river").texts
    read = tokenizer("bert-reranker").decode(pair.tokens)
    assert len(pair.tokens) == 32
    assert "river near the house the river[SEP]" in read.replace(" [SEP]", "[SEP]")


@pytest.mark.parametrize("words", [400, 100_000])
def test_a_query_that_leaves_no_room_for_a_document_is_refused_with_both_numbers(words: int) -> None:
    for call, most in ((judge, 256), (partial(rank, ["a"]), 32)):
        with pytest.raises(RequestError, match=rf"tokens, and .* at most {most} together") as caught:
            call(query="where " * words)
        assert (caught.value.code, caught.value.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "query")
    with pytest.raises(RequestError, match="'instruction' leaves no room"):
        judge("where?", instruction="find " * words)


@pytest.mark.parametrize(
    ("bad", "count", "param"),
    [(["a"], 2, "input"), ([[-1]], 1, "input"), ([3], 1, "input"), ([[1], [5, 1200]], 2, "input[1]")],
)
def test_texts_that_are_none_and_unknown_ids_are_refused(bad: list[Any], count: int, param: str) -> None:
    error = refusal(bad, count=count)
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)


HUGE = "station platform signal " * 20_000


def test_of_a_huge_text_only_a_part_is_tokenized_to_refuse_or_truncate_it() -> None:
    characters = list[int]()

    class Counting:
        def __call__(self, texts: Any, *more: Any, **options: Any) -> Any:
            characters.append(max(map(len, texts)) if isinstance(texts, list) else len(texts))
            return tokenizer()(texts, *more, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer(), name)

    counting = EmbedPreparer(Counting(), RULES)
    with pytest.raises(RequestError, match="resulted in more than 32 tokens") as caught:
        counting.prepare(factories.embed(["a", HUGE]), ())
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "input[1]")
    [text] = counting.prepare(factories.embed([HUGE], tokens_max=10), ()).texts
    assert list(text.tokens) == tokenizer()(HUGE, truncation=True, max_length=10)["input_ids"]
    assert 0 < max(characters) < len(HUGE) / 4
    [pair] = rank([HUGE]).texts
    whole = tokenizer("bert-reranker")("a river", HUGE, truncation=True, max_length=32)["input_ids"]
    assert list(pair.tokens) == whole
