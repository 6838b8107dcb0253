"""The worker's settings, as they are given on a command line."""

from __future__ import annotations

import pytest

from protocol import settings
from worker.config import WorkerSettings


def read(*argv: str) -> WorkerSettings:
    return settings.read(WorkerSettings, "worker", argv, {}, program="worker", about="")


def test_what_is_left_out_has_its_default() -> None:
    assert read() == WorkerSettings()
    assert (read().inter_token_target_s, read().admission_window_s) == (0.1, 0.005)
    assert read().cache_limit_bytes is None


@pytest.mark.parametrize(
    ("flag", "text", "field", "value"),
    [
        ("--inter-token-target", "0.05", "inter_token_target_s", 0.05),
        ("--prefill-tokens", "4096", "prefill_tokens", 4096),
        ("--admission-window", "0", "admission_window_s", 0.0),
        ("--cache-limit-bytes", "1000000", "cache_limit_bytes", 1_000_000),
        ("--memory-limit-bytes", "1000000", "memory_limit_bytes", 1_000_000),
        ("--memory-headroom", "0.25", "memory_headroom", 0.25),
    ],
)
def test_a_flag_is_read_with_its_type(flag: str, text: str, field: str, value: object) -> None:
    assert getattr(read(flag, text), field) == value


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--inter-token-target", "0"),
        ("--prefill-tokens", "0"),
        ("--admission-window", "-1"),
        ("--cache-limit-bytes", "0"),
        ("--memory-limit-bytes", "many"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(flag: str, text: str) -> None:
    with pytest.raises(settings.SettingsError, match=flag[2:].replace("-", "_")):
        read(flag, text)
