"""Server configurations for drivers: a lane for each, with the drivers' variables."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.drivers import Driver
from tests.conformance.programs import LOAD_S_MAX
from tests.models.fixtures import model_folder
from tests.system import running_system

KEY = "sk-conformance-1"
MODEL, EMBEDDER = "pocket", "bert-embedder"
CAPABLE = "tests.conformance.capable"

CONTEXT_BYTES = 2 * 2**20
"""KV cache limit of all requests, for a small context."""
LONG_WORDS = 20_000
"""Words of a prompt that exceeds the context."""
BURST = 24
"""Simultaneous requests, of which `RUNNING` run and `WAITING` may wait."""
RUNNING, WAITING = 2, 4


@dataclass(frozen=True, slots=True)
class House:
    """The server configuration of a lane. `flags`: of the gateway. `workers`: a module and its flags each.
    `told`: variables of the drivers. `asked`: the lane runs only drivers that use one of these variables."""

    workers: Sequence[tuple[str, ...]] = ((CAPABLE,),)
    flags: Sequence[str] = ()
    told: Mapping[str, str] = field(default_factory=dict)
    asked: Sequence[str] = ()

    def concerns(self, driver: Driver) -> bool:
        source = driver.path.read_text(errors="replace")
        return not self.asked or any(variable in source for variable in self.asked)

    def variables(self, driver: Driver) -> Mapping[str, str]:
        """Return the driver's variables; without EMBED_MODEL in it, MODEL is the embedding model."""
        if "EMBED" in self.told and "EMBED_MODEL" not in driver.path.read_text(errors="replace"):
            return {**self.told, "MODEL": EMBEDDER, "GROUPS_ONLY": "embed"}
        return self.told


HOUSES: dict[str, House] = {
    "capable": House(told={"CAPABLE": "1"}),
    "keys": House(flags=("--api-keys", KEY), told={"CAPABLE": "1", "AUTH": "1", "API_KEY": KEY}),
    "embeddings": House(
        workers=((CAPABLE,), ("worker", "--model", EMBEDDER)),
        told={"CAPABLE": "1", "EMBED": "1", "EMBED_MODEL": EMBEDDER, "GROUPS_ONLY": "embeddings,openai_npm"},
        asked=("EMBED",),
    ),
    "limits": House(
        workers=((CAPABLE, "--max-running", str(RUNNING), "--cache-limit-bytes", str(CONTEXT_BYTES)),),
        flags=("--max-waiting", str(WAITING)),
        told={"CTX": str(LONG_WORDS), "OVERLOAD_BURST": str(BURST), "GROUPS_ONLY": "errors,overload"},
        asked=("CTX", "OVERLOAD_BURST"),
    ),
}
"""Server configurations by lane."""


@contextlib.contextmanager
def opened(house: House) -> Iterator[str]:
    """Run the server and yield its address once all models are loaded. Raises `AssertionError` on failure."""
    with (
        tempfile.TemporaryDirectory(prefix="rh-") as folder,
        running_system(Path(folder), house.flags) as system,
    ):
        system.http.headers["authorization"] = f"Bearer {KEY}"
        for module, *flags in house.workers:
            named = [str(model_folder(flag)) if flag == EMBEDDER else flag for flag in flags]
            system.start_worker(*named, module=module)
        system.wait_loaded(len(house.workers), within_s=LOAD_S_MAX)
        yield system.url
