"""Scripts are run where something runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.page import scripts

collect_ignore_glob = [] if scripts.runnable() else ["test_script_*.py"]


@pytest.fixture(scope="session")
def call() -> Iterator[scripts.Call]:
    """Calls a function of one of the page's modules."""
    with scripts.running() as call:
        yield call
