"""Checks of a smoke test: a line for each, and `passed/total` last. Configured by BASE_URL, MODEL, API_KEY
and variables that describe the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

BASE = os.environ["BASE_URL"]
V1 = f"{BASE}/v1"
MODEL = os.environ["MODEL"]
KEY = os.environ.get("API_KEY", "none")

ASKED = "Say something."
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}

_checks: list[Callable[[], None]] = []


class Thing(BaseModel):
    colour: Literal["red", "green"]
    ok: bool


class Rich(Thing):
    # No grammar enforces the keyword; all else holds.
    tags: list[Literal["x", "y"]] = Field(max_length=2, json_schema_extra={"uniqueItems": True})


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register `function` as a check, which passes unless it raises."""
    _checks.append(function)
    return function


def when(variable: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check that only runs if the environment variable is set."""
    return check if os.environ.get(variable) else lambda function: function


def refused(error: type[Exception], function: Callable[..., object], **told: object) -> Any:
    """Return the `error` that `function` raises. Raises `AssertionError` if it does not."""
    try:
        function(**told)
    except error as found:
        return found
    raise AssertionError(f"no {error.__name__}")


def main() -> None:
    passed = sum([_passes(function) for function in _checks])
    print(f"{passed}/{len(_checks)}")
    raise SystemExit(passed != len(_checks))


def _passes(function: Callable[[], None]) -> bool:
    began, wrong = time.monotonic(), ""
    try:
        function()
    except Exception as error:
        wrong = f"  {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    verdict = "FAIL" if wrong else "OK  "
    print(f"{verdict} {function.__name__} {time.monotonic() - began:.2f} s{wrong}", flush=True)
    return not wrong
