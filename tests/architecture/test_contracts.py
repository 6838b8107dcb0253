"""Import contracts of the linter: each forbidden import, added to the graph of all imports, must be refused.

A folder's name says what may happen in it. The imports forbidden to a subpackage are listed in
`pyproject.toml` under `[tool.importlinter]`; `docs/architecture.md` gives the reasons. That the code keeps
them is checked by `make lint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import Contract, ContractCheck

ROOT = Path(__file__).resolve().parents[2]
KINDS: dict[str, type[Contract]] = {"forbidden": ForbiddenContract, "layers": LayersContract}

configure()
OPTIONS = read_user_options(str(ROOT / "pyproject.toml"))
CONTRACTS: list[dict[str, Any]] = OPTIONS.contracts_options

Refused = tuple[str, str]
"""Importing module and imported module."""


def siblings(layer: str) -> list[str]:
    """Return the modules of one layer. Separated by `|` they may not import each other, by `:` they may."""
    return [name.strip(" ()") for name in re.split(r"[|:]", layer)]


def forbidden(contract: dict[str, Any]) -> Iterator[Refused]:
    """Yield each import that a contract forbids."""
    if contract["type"] == "forbidden":
        for source in contract["source_modules"]:
            yield from ((source, name) for name in contract["forbidden_modules"])
        return
    assert contract["type"] == "layers", "this test supports only contracts of type forbidden and layers"
    for container in contract["containers"] or [""]:
        layers = [
            [f"{container}.{name}".strip(".") for name in siblings(layer)] for layer in contract["layers"]
        ]
        for high, low in combinations(layers, 2):
            yield from ((source, name) for source in low for name in high)
        for layer, names in zip(contract["layers"], layers, strict=True):
            if "|" in layer:
                yield from ((a, b) for a in names for b in names if a != b)


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    packages = OPTIONS.session_options["root_packages"]
    return grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)


def check(contract: dict[str, Any], graph: grimp.ImportGraph) -> ContractCheck:
    kind = KINDS[contract["type"]]
    return kind(contract["name"], OPTIONS.session_options, contract).check(graph=graph, verbose=False)


def refusals(check: ContractCheck) -> set[Refused]:
    """Return what a broken contract says of its imports."""
    found = {(each["importer"], each["imported"]) for each in check.metadata.get("invalid_dependencies", ())}
    chains = check.metadata.get("invalid_chains", ())
    return found | {(each["downstream_module"], each["upstream_module"]) for each in chains}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract["name"])
def test_each_import_that_a_contract_forbids_is_refused(
    contract: dict[str, Any], imports: grimp.ImportGraph
) -> None:
    pairs = set(forbidden(contract))
    assert pairs, "the contract forbids nothing"
    graph = deepcopy(imports)
    for source, name in pairs:
        if name not in graph.modules:
            graph.add_module(name, is_squashed="." not in name)
        graph.add_import(importer=source, imported=name)
    assert pairs <= refusals(check(contract, graph))


def test_a_module_beside_the_subpackages_is_refused(imports: grimp.ImportGraph) -> None:
    graph = deepcopy(imports)
    beside = {f"{package}.shed" for package in ("broker", "worker", "deploy")}
    for module in beside:
        graph.add_module(module)
    layers = [check(contract, graph) for contract in CONTRACTS if contract["type"] == "layers"]
    assert {module for each in layers for module in each.metadata["undeclared_modules"]} == beside
