"""Import contracts of `make lint`: every subpackage is in one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_a_module_beside_the_subpackages_is_refused_and_one_import_is_excused() -> None:
    contracts = OPTIONS["contracts"]
    layered = {name for each in contracts for name in each.get("containers", ()) if each.get("exhaustive")}
    assert {"protocol", "broker", "worker", "deploy"} <= layered
    excused = [imported for each in contracts for imported in each.get("ignore_imports", ())]
    assert excused == ["protocol.sockets -> zmq"]
    assert all(each.keys() & {"layers", "forbidden_modules", "protected_modules"} for each in contracts)


def test_each_module_of_an_api_is_pure_or_stands_in_the_layers() -> None:
    contracts = {each["name"].partition(",")[0]: each for each in OPTIONS["contracts"]}
    pure = set(contracts["broker: what it decides and writes is pure"]["source_modules"])
    layers = contracts["broker: routes stand above the application layer"]["layers"]
    routes, batches = (set(layer.split()) - {":"} for layer in (layers[1], layers[-1]))
    found = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "broker" / "api").rglob("*.py")}
    modules = {".".join(path.parts) for path in found if path.name != "__init__"}
    assert modules == {name for name in pure | routes | batches if name.startswith("broker.api.")}
    assert not routes & pure
    assert {name for name in modules if name.endswith("routes")} == routes - {"broker.api.batches.access"}
