"""Fixtures: applications with a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.application import House


@pytest.fixture
def house() -> Iterator[House]:
    """Application with one worker."""
    house = House()
    house.line.serving("w", "org/model", rows=1)
    yield house
    house.close()


@pytest.fixture
def roomy() -> Iterator[House]:
    """Application with one worker of five rows."""
    house = House()
    house.line.serving("w", "org/model", rows=4)
    yield house
    house.close()
