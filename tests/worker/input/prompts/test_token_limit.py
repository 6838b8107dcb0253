"""Token limit: long texts are refused by slices, and those that fit keep their exact tokens."""

from __future__ import annotations

from functools import cache

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import Code, RequestError
from protocol.types import TokenizeOptions, ToolCallConstraint
from tests.factories import request
from tests.models.fixtures import model_folder
from tests.worker.trained_tokenizers import KINDS, trained
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.input.prompts.token_limit import (
    CUT_TOKENS,
    SLACK,
    SLICE_CHARACTERS,
    WHOLE_BYTES_MAX,
    TokenLimit,
    slices,
)
from worker.values import CancelToken, PreparationCancelled, SamplingParams

CONTEXT = 2**15
LINE = "The 4:50 from Paddington - platform 7 - is late; 駅はどこ? 🚂\n"


@cache
def tokenizer() -> TokenizerWrapper:
    return open_tokenizer(model_folder("dense"), [1987])


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def preparer(context_length: int = CONTEXT) -> TextPreparer:
    return TextPreparer(tokenizer(), PromptRules(context_length, 2048, SamplingParams()))


def test_long_prompt_that_fits_is_never_refused_and_has_the_tokens_of_one_encode() -> None:
    text = LINE * 4200
    expected = encode(text)
    assert len(text.encode()) > WHOLE_BYTES_MAX
    for share in (0.5, 0.99, 1.0):
        TokenLimit(round(len(expected) / share)).check_text(text, "prompt", encode)
    exact = preparer(len(expected) + 1).prepare(request(prompt=text), ())
    assert list(exact.tokens) == expected
    with pytest.raises(RequestError, match=f"resulted in {len(expected)} tokens"):
        preparer(len(expected)).prepare(request(prompt=text), ())


def test_text_far_beyond_the_limit_is_refused_after_a_part_of_it() -> None:
    characters = list[int]()

    def counted(text: str) -> list[int]:
        characters.append(len(text))
        return encode(text)

    with pytest.raises(RequestError, match=f"resulted in more than {CONTEXT} tokens") as caught:
        TokenLimit(CONTEXT).check_text(LINE * 100_000, "prompt", counted)
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "prompt")
    assert caught.value.details == {"prompt_tokens": CONTEXT + 1, "context_length": CONTEXT}
    assert sum(characters) < 4 * SLICE_CHARACTERS


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "x y" * 3_000_000}, {"prompt": "x y" * 3_000_000, "tokenizing": TokenizeOptions()}],
    ids=["prompt", "tokenize"],
)
def test_megabytes_are_refused_by_a_part(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    inner, characters = tokenizer()._tokenizer, list[int]()
    encode = inner.encode

    def counted(text: str, **options: bool) -> list[int]:
        characters.append(len(text))
        return list(encode(text, **options))

    monkeypatch.setattr(inner, "encode", counted)
    asked, prepared = request(**fields), preparer()
    with pytest.raises(RequestError) as caught:
        (prepared.tokenize if "tokenizing" in fields else prepared.prepare)(asked, ())
    assert caught.value.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert 0 < sum(characters) < 1_000_000


def test_context_is_checked_before_the_grammar_is_compiled() -> None:
    tools = [{"type": "function", "function": {"name": f"tool{n}", "parameters": {}}} for n in range(2000)]
    calling, messages = ToolCallConstraint(required=True), [{"role": "user", "content": "x"}]
    asked = request(messages=messages, tools=tools, calling=calling)
    with pytest.raises(RequestError) as caught:
        preparer(100).prepare(asked, ())
    assert caught.value.code is Code.CONTEXT_LENGTH_EXCEEDED


def test_cancelled_text_is_not_tokenized_further() -> None:
    cancel_token, pieces = CancelToken(), []

    def encode_once(text: str) -> list[int]:
        pieces.append(text)
        cancel_token.cancel()
        return encode(text)

    with pytest.raises(PreparationCancelled):
        TokenLimit(10 * CONTEXT, cancel_token=cancel_token).check_text(LINE * 10_000, "prompt", encode_once)
    assert len(pieces) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_a_text_changes_its_count_by_far_less_than_the_margin(kind: str) -> None:
    own = trained(kind)
    text = LINE * 1000 + "a" * 70_000 + " " * 70_000 + "\U0001f300" * 20_000
    whole = len(own.encode(text, add_special_tokens=False).ids)
    pieces = list(slices(text))
    parts = sum(len(own.encode(piece, add_special_tokens=False).ids) for piece in pieces)
    assert parts <= SLACK * whole + CUT_TOKENS * len(pieces)
