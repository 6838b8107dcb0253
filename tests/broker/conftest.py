"""Applications with a worker."""

from __future__ import annotations

import pytest

from tests.broker.house import House


@pytest.fixture
def house() -> House:
    """One worker serves."""
    house = House()
    house.line.serving("w", "org/model", rows=1)
    return house


@pytest.fixture
def roomy() -> House:
    """One worker serves, with room for five."""
    house = House()
    house.line.serving("w", "org/model", rows=4)
    return house
