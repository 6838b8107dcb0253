"""Samples of a load's requests, and their summaries."""

from __future__ import annotations

import pytest

from deploy.load.client import note
from deploy.load.samples import Sample, summarize


def answered(sent_at: float, *pieces: float, tokens: int = 0) -> Sample:
    return Sample(sent_at, list(pieces), pieces[-1] + 0.5, tokens=tokens, prompt_tokens=10, cached_tokens=4)


def test_times_are_those_of_what_was_answered_and_errors_are_counted() -> None:
    told = summarize(
        [
            answered(0.0, 1.0, 1.5, 2.5),
            answered(1.0, 3.0, 3.25, tokens=5),
            Sample(0.5, [0.75], 9.5, error="503 text_generation_busy"),
            Sample(0.5, [], 1.0),
        ]
    )
    assert (told.requests, told.seconds) == (4, 9.5)
    assert told.errors == {"503 text_generation_busy": 1, "empty answer": 1}
    assert (told.tokens, told.prompt_tokens, told.cached_tokens) == (3 + 5, 20, 8)
    assert told.tokens_per_s == pytest.approx(8 / 9.5)
    assert told.requests_per_s == pytest.approx(2 / 9.5)
    assert told.first_s is not None
    assert (told.first_s.at[50], told.first_s.at[99], told.first_s.mean) == (1.0, 2.0, 1.5)
    assert told.gap_s is not None
    assert (told.gap_s.count, told.gap_s.at[90]) == (3, 1.0)
    assert told.per_token_s is not None
    assert told.per_token_s.at[50] == pytest.approx(0.25 / 4)


def test_a_stream_is_read_as_servers_write_it() -> None:
    sample = Sample(0.0)
    note(sample, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0.5)
    note(sample, {"choices": [{"delta": {"content": "a"}}]}, 1.0)
    note(sample, {"choices": [{"delta": {"reasoning_content": "b", "reasoning": "b"}}]}, 2.0)
    note(sample, {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}], "usage": None}, 3.0)
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
    note(sample, {"choices": [], "usage": usage}, 4.0)
    assert sample.pieces == [1.0, 2.0, 3.0]
    assert (sample.prompt_tokens, sample.tokens, sample.cached_tokens) == (7, 9, 5)
    note(sample, {"error": {"message": "gone"}}, 5.0)
    assert sample.error
