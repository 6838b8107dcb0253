"""Fill-in-the-middle prompts, in the order and with the markers of the model's family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import Code, RequestError
from tests.factories import request
from tests.models.infill import QWEN, infill_folder
from worker.input.prompts.completion import infilling_of
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.values import EngineRequest, SamplingParams

RULES = PromptRules(context_length=100, vocabulary=2048, defaults=SamplingParams())
PREFIX, SUFFIX = "def f():\n    ", "\n    return 駅"


def prepare(folder: Path, **fields: Any) -> EngineRequest:
    return TextPreparer(open_tokenizer(folder, [1987]), RULES).prepare(request(**fields), ())


@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        (QWEN, "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}{P}{1}{S}{2}"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "{0}{P}{1}{S}{2}"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{S}[PREFIX]{P}"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codellama", "codestral"],
)
def test_a_gap_is_marked_as_its_family_does(tmp_path: Path, markers: tuple[str, ...], expected: str) -> None:
    folder = infill_folder(tmp_path, markers)
    engine_request = prepare(folder, prompt=PREFIX, suffix=SUFFIX)
    tokenizer = open_tokenizer(folder, [])
    marked = expected.format(*markers, P=PREFIX, S=SUFFIX)
    assert tokenizer.decode(list(engine_request.tokens)) == marked
    assert engine_request.end_tokens >= {tokenizer.convert_tokens_to_ids(marker) for marker in markers}
    assert 1987 in engine_request.end_tokens


def test_a_gap_is_one_only_with_a_suffix_and_its_prefix_may_be_token_ids(tmp_path: Path) -> None:
    folder = infill_folder(tmp_path)
    tokenizer = open_tokenizer(folder, [1987])
    plain = prepare(folder, prompt=PREFIX)
    assert tokenizer.decode(list(plain.tokens)) == PREFIX
    assert len(plain.end_tokens) == len(tokenizer.eos_token_ids)
    as_text = prepare(folder, prompt=PREFIX, suffix=SUFFIX, ignore_eos=True)
    assert as_text.end_tokens == frozenset()
    ids = tokenizer.encode(PREFIX, add_special_tokens=False)
    assert prepare(folder, tokens=ids, suffix=SUFFIX).tokens == as_text.tokens
    with pytest.raises(RequestError) as caught:
        prepare(folder, prompt="a", suffix="b c " * 100)
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "prompt")


@pytest.mark.parametrize("markers", [(), QWEN[:2]], ids=["none", "not all"])
def test_a_model_that_fills_no_gaps_refuses_the_suffix(tmp_path: Path, markers: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(infill_folder(tmp_path, markers), prompt=PREFIX, suffix=SUFFIX)
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED_PARAMETER, "suffix")


def test_where_every_text_gets_a_space_a_suffix_gets_none() -> None:
    # As SentencePiece: a space before the text, and one piece per word.
    pieces: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        words = (" " + text).replace(" ", "|▁").replace("☺", "|☺|").split("|")
        return [pieces.setdefault(word, len(pieces)) for word in words if word]

    infilling = infilling_of({marker: 100 + n for n, marker in enumerate(("▁<PRE>", "▁<SUF>", "▁<MID>"))})
    assert infilling is not None
    tokens = infilling.tokens([1], encode("a"), "b c", encode)
    spelled = {number: piece for piece, number in pieces.items()}
    assert [spelled.get(token, token) for token in tokens[1:]] == [100, "▁a", 101, "b", "▁c", 102]
    assert tokens[0] == 1
