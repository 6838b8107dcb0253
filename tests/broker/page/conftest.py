"""Fixtures for the page's scripts, whose tests are collected only where node is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.page import scripts

collect_ignore_glob = [] if scripts.runnable() else ["test_script_*.py"]


@pytest.fixture(scope="session")
def call() -> Iterator[scripts.Call]:
    """Function that calls a function of one of the page's modules."""
    with scripts.running() as call:
        yield call
