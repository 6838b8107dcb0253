"""What a model is proven to do is proven once for all tests, as for all starts of a worker on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.load.options import LoadOptions


@pytest.fixture(scope="session")
def probe_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probes")


@pytest.fixture(scope="module", autouse=True)
def _probes_are_kept(probe_results: Path) -> Iterator[None]:
    """Make it the default folder of probe results. A test of a probe says `probe_folder=None`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(LoadOptions)["__init__"].__kwdefaults__, "probe_folder", probe_results)
        yield
