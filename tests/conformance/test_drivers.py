"""Detection of drivers, and their environments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conformance.__main__ import SMOKES
from tests.conformance.drivers import DRIVERS, SHARED, drivers_in, environment_of
from tests.conformance.environments import PROGRAMS

PINNED = {"python": r"[\w.-]+(\[[\w,]+\])?==\d[\w.]*", "javascript": r"(@[\w-]+/)?[\w-]+@\d[\w.-]*"}
ENVIRONMENTS = {environment.name: environment for environment in DRIVERS.values()}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("openai_sdk.py", "openai"),
        ("anthropic_sdk.py", "anthropic"),
        ("langchain_smoke.py", "langchain"),
        ("litellm_smoke.py", "litellm"),
        ("ai_sdk.mjs", "javascript"),
        ("openai_smoke.mjs", "javascript"),
    ],
)
def test_a_driver_is_known_by_its_name(file: str, name: str) -> None:
    environment = environment_of(file)
    assert environment is not None
    assert environment.name == name


@pytest.mark.parametrize(
    "file", ["common.py", "checks.mjs", "openai.py", "my_openai_sdk.py", "openai_sdk.txt"]
)
def test_any_other_file_is_none(file: str) -> None:
    assert environment_of(file) is None


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_package_has_its_version(name: str) -> None:
    environment = ENVIRONMENTS[name]
    assert environment.packages
    for package in environment.packages:
        assert re.fullmatch(PINNED[environment.language], package)


def test_environments_of_one_name_are_the_same() -> None:
    assert all(ENVIRONMENTS[environment.name] == environment for environment in DRIVERS.values())
    assert {environment.language for environment in ENVIRONMENTS.values()} <= set(PROGRAMS)


def test_each_environment_has_a_smoke_and_all_of_ours_are_driven() -> None:
    drivers, others = drivers_in(SMOKES)
    assert {driver.environment.name for driver in drivers} == set(ENVIRONMENTS)
    assert not others


def test_a_folder_is_read_in_order_and_strangers_are_told(tmp_path: Path) -> None:
    for name in ("openai_b.py", "ai_sdk.mjs", "new_sdk.py", "common.py", "README.md"):
        (tmp_path / name).touch()
    drivers, others = drivers_in(tmp_path)
    assert [driver.name for driver in drivers] == ["ai_sdk.mjs", "openai_b.py"]
    assert others == ["new_sdk.py"]
    assert "common" in SHARED
