"""What a device can do: asked in a process that may die, and its tests left out only where it cannot."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests import device


def test_this_device_can_do_what_models_need() -> None:
    assert {question: device.lack(question) for question in ("float32", "reductions")} == {
        "float32": "",
        "reductions": "",
    }


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('Unable to load kernel x_bfloat16')", "Unable to load kernel"),
        (f"import os; os.kill(os.getpid(), {signal.SIGABRT})", "SIGABRT"),
    ],
)
def test_what_fails_or_kills_its_process_is_lacking(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device.QUESTIONS, code, code)
    assert reason in device.lack(code)


def test_marked_tests_are_left_out_of_macs_that_lack_the_type(request: pytest.FixtureRequest) -> None:
    plain: Any = request.node

    class Marked:
        def get_closest_marker(self, name: str) -> str:
            return name

    marked: Any = Marked()
    items = [plain, marked]
    assert device.split(items, lambda question: "no kernel", "darwin") == ([plain], [marked])
    assert device.split(items, lambda question: "", "darwin") == (items, [])
    assert device.split(items, lambda question: "no kernel", "linux") == (items, [])
