"""Suggested models by available memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.command.serve import _model_hint
from deploy.machine.facts import MachineMemory, usable_of_mac
from deploy.machine.suggestions import (
    SUGGESTIONS,
    best_fit,
    context_that_fits,
    first_model_hint,
    fit_with_experts_on_disk,
    models_that_fit,
)
from deploy.supervisor.child import ServedModel

GB = 10**9
GIB = 2**30


@pytest.mark.parametrize(
    ("machine", "chip", "name"),
    [
        (16 * GIB, "Apple M1", "Qwen3.5-4B-4bit"),  # the larger ones are too slow to read along with
        (64 * GIB, "Apple M3 Max", "Qwen3-Coder-Next-4bit"),
        (16 * GIB, "unknown", "Qwen3.5-9B-4bit"),
    ],
)
def test_the_model_to_begin_with_is_large_and_not_slow(machine: int, chip: str, name: str) -> None:
    memory = MachineMemory(machine, usable_of_mac(machine, None))
    fits = models_that_fit(memory.for_model, chip)
    best = best_fit(fits)
    assert best.model == BY_NAME[name]
    hint = first_model_hint(fits)
    assert f"This machine can run mlx-community/{name} (" in hint
    assert ("tokens/s" in hint) == (chip != "unknown")
    assert len(hint.splitlines()) == 1


def test_serve_hints_at_a_model_on_a_mac_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MachineMemory(16 * GIB, usable_of_mac(16 * GIB, None))
    monkeypatch.setattr("deploy.machine.facts.read_memory", lambda platform: memory)
    monkeypatch.setattr("deploy.machine.facts.chip_name", lambda platform: "Apple M4")
    embedded, named = ServedModel(name="pocket"), ServedModel(name="a", model="org/a")
    assert "mlx-community/" in _model_hint([embedded], "darwin")
    assert _model_hint([embedded], "linux") == _model_hint([named], "darwin") == ""


def test_a_larger_mixture_fits_with_some_of_its_experts_on_disk() -> None:
    found = fit_with_experts_on_disk(30 * GB)
    model, in_memory = found
    assert "Coder-Next" in model.id
    assert context_that_fits(model, 30 * GB) == 0
    assert model.expert_bytes / 2 <= in_memory < model.expert_bytes < model.weight_bytes
    assert fit_with_experts_on_disk(5 * GB) is None, "less than half of the experts of any"
    assert fit_with_experts_on_disk(60 * GB) is None, "the largest one fits"


# --- docs/mac.md agrees ----------------------------------------------------------------------------

MAC = (Path(__file__).resolve().parents[3] / "docs" / "mac.md").read_text()
SHOWN = re.findall(
    r"^\| ([\w.-]+) \| ([\d.]+) GB \| (\d+).* × (\d+) × (\d+) \| ([\d,]+) \|$", MAC, re.MULTILINE
)
MACHINES = re.findall(r"^\| (\d+) GB(, 85%)? \| ([\d.]+) GB \| (.*) \|$", MAC, re.MULTILINE)
BY_NAME = {each.id.partition("/")[2]: each for each in SUGGESTIONS}


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row[0])
def test_the_bytes_of_a_token_are_as_the_page_about_macs_reckons_them(row: tuple[str, ...]) -> None:
    name, weights, layers, heads, size, token_bytes = row
    suggestion = BY_NAME[name]
    assert f"{suggestion.weight_bytes / GB:.1f}" == weights
    assert 2 * int(layers) * int(heads) * int(size) * 2 == suggestion.token_bytes
    assert f"{suggestion.token_bytes:,}" == token_bytes


@pytest.mark.parametrize("row", MACHINES, ids=lambda row: row[0] + row[1])
def test_the_contexts_that_fit_are_as_the_page_about_macs_has_them(row: tuple[str, ...]) -> None:
    gigabytes, raised, room, contexts = row
    total = int(gigabytes) * GIB
    limit = total * 85 // 100 // 2**20 * 2**20 if raised else None
    memory = MachineMemory(total, usable_of_mac(total, limit), limit)
    fitting = {fit.model: fit.context for fit in models_that_fit(memory.for_model)}
    found = [fitting.get(BY_NAME[name]) for name, *_ in SHOWN]
    assert f"{memory.for_model / GB:.1f}" == room
    assert " | ".join("–" if each is None else f"{each:,}" for each in found) == contexts
