"""Logits are bit-identical on all ranks."""

from __future__ import annotations

import pytest

from tests.worker.ranks.lives import Case
from tests.worker.ranks.logits import compare


@pytest.mark.timeout(200)
def test_ranks_on_chips_of_one_kind_see_the_same_logits() -> None:
    passes, differing = compare(Case.of("qwen3:tensor:2"))
    assert passes > 20
    assert differing == 0
