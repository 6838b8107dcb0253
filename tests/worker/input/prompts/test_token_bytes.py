"""Bytes per token: the bound is safe where there is one."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.worker.trained_tokenizers import CORPUS, KINDS, trained
from worker.input.prompts.token_bytes import NFC_SHRINK_MAX, token_bytes_max

KNOWN = KINDS[:3]
PIECES = (
    "駅", "a", "=" * 40, " " * 9, "\n", "e\u0301", "\u1fbe\u0308\u0341", "▁", "Ġ", "🚂", "\u3000", CORPUS[0]
)  # fmt: skip


def bound(kind: str) -> int:
    return token_bytes_max(PreTrainedTokenizerFast(tokenizer_object=trained(kind)))


@given(st.sampled_from(KNOWN), st.lists(st.sampled_from(PIECES) | st.text(max_size=9), max_size=50))
def test_no_text_has_fewer_tokens_than_its_bytes_over_the_bound(kind: str, pieces: list[str]) -> None:
    text = "".join(pieces).encode(errors="ignore").decode()
    solid = len("".join(text.split()).encode())
    tokens = len(trained(kind).encode(text, add_special_tokens=False).ids)
    assert tokens * bound(kind) >= solid


@pytest.mark.parametrize("kind", KINDS[3:])
def test_bound_is_unknown_where_one_token_may_stand_for_any_text(kind: str) -> None:
    assert bound(kind) == 0


def test_bound_is_unknown_where_text_is_dropped() -> None:
    own = type(trained("byte-level")).from_str(trained("byte-level").to_str())
    own.normalizer = normalizers.StripAccents()
    assert token_bytes_max(PreTrainedTokenizerFast(tokenizer_object=own)) == 0
    own.normalizer = None
    assert token_bytes_max(PreTrainedTokenizerFast(tokenizer_object=own)) == bound("byte-level")
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", behavior="removed"), pre_tokenizers.ByteLevel()]
    )
    assert token_bytes_max(PreTrainedTokenizerFast(tokenizer_object=own)) == 0


def test_nfc_shortens_no_text_by_more_than_the_factor() -> None:
    # Every character that NFC can produce, with the longest text that it is made from.
    singles: dict[str, int] = {}
    letters = [chr(n) for n in range(0x110000) if unicodedata.category(chr(n)) not in ("Cs", "Cn", "Co")]
    for letter in letters:
        if unicodedata.is_normalized("NFD", letter):
            continue
        part = unicodedata.normalize("NFD", letter)
        if len(part) == 1:  # another way to write a single character
            singles[part] = max(singles.get(part, 0), len(letter.encode()))
    for letter in letters:
        if not unicodedata.is_normalized("NFC", letter):
            continue
        parts = unicodedata.normalize("NFD", letter)
        longest = sum(max(len(part.encode()), singles.get(part, 0)) for part in parts)
        assert longest <= NFC_SHRINK_MAX * len(letter.encode()), hex(ord(letter))
