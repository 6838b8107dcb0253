"""Import contracts of `make lint`: every subpackage is in one. `docs/architecture.md` gives their reasons."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_a_module_beside_the_subpackages_is_refused_and_one_import_is_excused() -> None:
    contracts = OPTIONS["contracts"]
    layered = {name for each in contracts for name in each.get("containers", ()) if each.get("exhaustive")}
    assert {"broker", "worker", "deploy"} <= layered
    excused = [imported for each in contracts for imported in each.get("ignore_imports", ())]
    assert excused == ["protocol.sockets -> zmq"]
    assert all(each.get("layers") or each["forbidden_modules"] for each in contracts)
