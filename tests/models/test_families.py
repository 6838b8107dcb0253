"""Every upstream family has a config that builds, or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.models import whole_families
from tests.models.families import CUT_SHOWS, REFUSED, config_of, listed
from tests.models.weights import new_model

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_families_are_found_by_listing_and_named_ones_are_among_them() -> None:
    families = listed()
    assert len(families) > 100
    assert {"llama", "lfm2-vl", "solar_open", *REFUSED, *CUT_SHOWS} <= set(families)
    assert not {"base", "cache", "rope_utils", "switch_layers"} & set(families)


def test_families_of_mlx_vlm_alone_are_those_that_mlx_lm_has_by_no_name() -> None:
    families = set(whole_families.listed())
    assert {"aya_vision", "qwen3_5_text", "flux2", *whole_families.REFUSED} <= families
    known = {"bert", "gemma4_unified", "klear", "lfm2_vl", "llama", "llava", "qwen2_5_vl", "xlm_roberta"}
    assert not known & families


def test_the_documents_have_a_row_for_each_family_and_no_other() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (?:yes|no|refused) \|", TABLE.read_text(), re.MULTILINE)
    assert rows == [*listed(), *whole_families.listed()]


@pytest.mark.parametrize("family", [family for family in listed() if family not in REFUSED])
def test_each_family_is_built_of_its_config(family: str) -> None:
    assert new_model(config_of(family)).layers
