"""Tokenizers that are opened ahead: each is given to one alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.models.fixtures import model_folder
from worker.models.config import read_config
from worker.models.tokenizers import Tokenizers


def test_each_is_taken_once_and_those_beyond_are_opened_when_they_are() -> None:
    folder = model_folder("dense")
    tokenizers = Tokenizers(folder, read_config(folder, "dense"), ahead=2)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: tokenizers.take(), range(4)))
    assert len({id(tokenizer) for tokenizer in taken}) == 4
    assert {tuple(tokenizer.encode("a word")) for tokenizer in taken} == {tuple(taken[0].encode("a word"))}


def test_what_is_wrong_is_told_to_whoever_takes_one(tmp_path: Path) -> None:
    config = read_config(model_folder("dense"), "dense")
    tokenizers = Tokenizers(tmp_path, config, ahead=1)
    for _ in range(2):
        with pytest.raises((OSError, ValueError)):
            tokenizers.take()
