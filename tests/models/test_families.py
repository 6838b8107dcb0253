"""Every upstream family has a config that builds, or a reason why it has none."""

from __future__ import annotations

import pytest

from tests.models import whole_families
from tests.models.families import REFUSED, config_of, listed
from tests.models.weights import new_model
from tests.zoo import TABLE, families_in


def test_the_document_has_each_family_once_and_no_other() -> None:
    served, reasons = families_in(TABLE.read_text(encoding="utf-8"))
    refused = [name for name, reason in reasons.items() if reason.startswith("refused: ")]
    assert sorted([*served, *refused]) == sorted([*listed(), *whole_families.listed()])
    assert set(refused) >= {*REFUSED}


@pytest.mark.parametrize("family", [family for family in listed() if family not in REFUSED])
def test_each_family_is_built_of_its_config(family: str) -> None:
    assert new_model(config_of(family)).layers
