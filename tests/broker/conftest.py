"""Applications with a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.house import House


@pytest.fixture
def house() -> Iterator[House]:
    """One worker serves."""
    house = House()
    house.line.serving("w", "org/model", rows=1)
    yield house
    house.close()


@pytest.fixture
def roomy() -> Iterator[House]:
    """One worker serves, with room for five."""
    house = House()
    house.line.serving("w", "org/model", rows=4)
    yield house
    house.close()
