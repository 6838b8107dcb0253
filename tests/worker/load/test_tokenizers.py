"""Tokenizers that are opened in advance: each has one user only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.models.fixtures import model_folder
from worker.load import text as module
from worker.load.config import read_config
from worker.load.text import Tokenizers

WAIT_S = 10.0


def test_each_is_taken_once_and_those_beyond_are_opened_when_they_are() -> None:
    folder = model_folder("dense")
    tokenizers = Tokenizers(folder, read_config(folder, "dense"), prefetch=2)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: tokenizers.take(), range(4)))
    assert len({id(tokenizer) for tokenizer in taken}) == 4
    assert {tuple(tokenizer.encode("a word")) for tokenizer in taken} == {tuple(taken[0].encode("a word"))}


def test_slow_tokenizer_raises_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(module, "open_tokenizer", lambda *_: gate.wait(WAIT_S))
    monkeypatch.setattr(module, "OPEN_S_MAX", 0.05)
    folder = model_folder("dense")
    tokenizers = Tokenizers(folder, read_config(folder, "dense"), prefetch=1)
    try:
        with pytest.raises(TimeoutError, match=r"not opened within 0.05 s"):
            tokenizers.take()
    finally:
        gate.set()
