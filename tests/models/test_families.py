"""Every upstream family has a config that builds, or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.models import whole_families
from tests.models.families import REFUSED, config_of, listed
from tests.models.weights import new_model

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_documents_have_a_row_for_each_family_and_no_other() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (?:yes|no|refused) \|", TABLE.read_text(), re.MULTILINE)
    assert rows == [*listed(), *whole_families.listed()]


@pytest.mark.parametrize("family", [family for family in listed() if family not in REFUSED])
def test_each_family_is_built_of_its_config(family: str) -> None:
    assert new_model(config_of(family)).layers
