"""Threads that wait for another thread to open something."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from worker.input import locks
from worker.input.media import processor
from worker.input.media.processor import LazyProcessor


def test_a_processor_that_another_thread_opens_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks.acquired.__wrapped__, "__defaults__", (0.05,))
    begun, gate = threading.Event(), threading.Event()

    def load(folder: Path) -> None:
        begun.set()
        gate.wait(10.0)

    monkeypatch.setattr(processor, "load_processor", load)
    opening = LazyProcessor(Path())
    first = threading.Thread(target=opening, daemon=True)
    first.start()
    assert begun.wait(10.0)
    with pytest.raises(TimeoutError, match="the processor"):
        opening()
    gate.set()
    first.join(10.0)
