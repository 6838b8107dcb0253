"""Suggested models by available memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.machine.facts import MachineMemory, read_memory, usable_of_mac
from deploy.machine.suggestions import CONTEXT_WANTED, SUGGESTIONS, context_that_fits, models_that_fit
from protocol.model_folder import is_folder

GB = 10**9
GIB = 2**30


@given(st.integers(0, 200 * GB))
def test_suggested_models_fit_into_memory_with_their_context(room: int) -> None:
    for suggestion, context in models_that_fit(room):
        assert CONTEXT_WANTED <= context <= suggestion.context_length
        assert suggestion.weight_bytes + context * suggestion.token_bytes <= room


@given(st.integers(0, 100 * GB), st.integers(0, 100 * GB))
def test_more_memory_never_means_less(room: int, more: int) -> None:
    before, after = (
        {each.id: context for each, context in models_that_fit(size)} for size in (room, room + more)
    )
    assert before.keys() <= after.keys()
    assert all(context <= after[id] for id, context in before.items())


@pytest.mark.parametrize(
    ("machine", "id"),
    [
        (8 * GIB, "mlx-community/Qwen3-4B-4bit"),
        (16 * GIB, "mlx-community/Qwen3-14B-4bit"),
        (24 * GIB, "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        (128 * GIB, "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit"),
    ],
)
def test_macs_are_suggested_the_largest_that_leaves_room_to_talk(machine: int, id: str) -> None:
    memory = MachineMemory(machine, machine, usable_of_mac(machine, None))
    assert models_that_fit(memory.for_model)[0][0].id == id


def test_the_largest_comes_first_and_each_is_an_id() -> None:
    assert [each.weight_bytes for each in SUGGESTIONS] == sorted(each.weight_bytes for each in SUGGESTIONS)
    assert not any(is_folder(each.id) for each in SUGGESTIONS)
    assert context_that_fits(SUGGESTIONS[0], 0) == 0


def test_a_limit_that_somebody_has_set_counts_and_no_more_than_there_is() -> None:
    assert usable_of_mac(16 * GIB, 14 * GIB) == 14 * GIB
    assert usable_of_mac(16 * GIB, 99 * GIB) == 16 * GIB
    assert usable_of_mac(16 * GIB, None) == 16 * GIB * 2 // 3
    assert usable_of_mac(64 * GIB, None) == 48 * GIB


def test_this_machine_has_memory() -> None:
    memory = read_memory()
    assert 0 < memory.for_model < memory.usable <= memory.total


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
    memory = MachineMemory(total, total, usable_of_mac(total, limit), limit)
    fitting = dict(models_that_fit(memory.for_model))
    found = [fitting.get(BY_NAME[name]) for name, *_ in SHOWN]
    assert f"{memory.for_model / GB:.1f}" == room
    assert " | ".join("–" if each is None else f"{each:,}" for each in found) == contexts


def test_the_page_about_macs_has_both_tables() -> None:
    assert (len(SHOWN), len(MACHINES)) == (6, 11)
