"""The trained tokenizer, as transformers loads it."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.models.fixtures import model_folder
from tests.models.make import NAMES
from tests.models.tokenizer import SIZE, token_bytes

ODD_TEXTS = (
    "",
    " a , b ! c ?  two  spaces \t\r\n\n end ",
    "cafe\u0301 A\u030a e\u0301e\u0301",
    "👍🏽 👩🏻\u200d🔬 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 1️⃣",
    "今天天气很好。東京は日本の首都です。안녕하세요!",
    "\x00\x01\x7f\ufeff\u2028\ufffd",
)


@cache
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(model_folder(name))


@cache
def pieces() -> list[bytes]:
    return token_bytes(Tokenizer.from_file(str(model_folder("hybrid") / "tokenizer.json")))


def decoded(name: str, text: str) -> str:
    loaded = tokenizer(name)
    return str(loaded.decode(loaded.encode(text)))


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_as_a_fast_tokenizer_that_encodes_as_its_file_says(name: str) -> None:
    loaded = tokenizer(name)
    assert loaded.is_fast
    assert len(loaded) == SIZE
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    from_file = Tokenizer.from_file(str(model_folder(name) / "tokenizer.json"))
    for text in ODD_TEXTS:
        assert loaded.encode(text) == from_file.encode(text).ids
        assert decoded(name, text) == (unicodedata.normalize("NFC", text) if name == "hybrid" else text)
    for text, is_one in (("🫠", False), (" beautiful", True), ("首都", True)):
        assert (len(tokenizer("dense").encode(text)) == 1) == is_one


@given(st.lists(st.integers(0, SIZE - 1)))
def test_any_ids_decode_to_the_bytes_they_stand_for(ids: list[int]) -> None:
    assert tokenizer("hybrid").decode(ids) == b"".join(pieces()[i] for i in ids).decode(errors="replace")
