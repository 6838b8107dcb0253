"""Ids of tool calls: the same wherever a stream resumes."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.factories import engine_request
from worker.contract.engine import SamplingParams
from worker.output.calls.writer import namer_of

PREPARED = engine_request("a", (5, 6), sampling=SamplingParams(seed=2**63 - 1))


def test_ids_belong_to_the_prompt_the_seed_and_the_place_wherever_a_stream_resumes() -> None:
    others = [replace(PREPARED, tokens=(5, 6, 7)), replace(PREPARED, sampling=SamplingParams(seed=3))]
    ids = [namer_of(each)(index) for each in (PREPARED, *others) for index in range(3)]
    assert len({*ids}) == 9
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    assert namer_of(replace(PREPARED, id="a~2", resume=(9,)))(1) == ids[1]
