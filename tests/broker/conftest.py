"""Fixtures: applications with a worker. Tests that are coroutines run on an event loop of their own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.broker.application import House, house_with_worker
from tests.broker.asgi import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def house() -> Iterator[House]:
    """Application with one worker."""
    house = house_with_worker(rows=1)
    yield house
    house.close()


@pytest.fixture
def roomy() -> Iterator[House]:
    """Application with one worker of four rows."""
    house = house_with_worker()
    yield house
    house.close()
