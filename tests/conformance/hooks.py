"""Hooks of schemathesis, in its own environment: the check of responses, and names of existing objects."""

from __future__ import annotations

import atexit
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

from tests.conformance.judge import complaint

NAMED = 7 / 8
"""Fraction of cases with an existing model or response."""

MODELS: dict[str, str] = json.loads(os.environ["FUZZ_MODELS"])
"""Models by path; the empty path is the default."""

_kept: list[str] = []
_told: Counter[str] = Counter()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    dice = random.Random(f"{case.path} {case.body!r} {case.path_parameters!r}")
    model = MODELS.get(case.path, MODELS[""])
    if isinstance(case.body, dict) and dice.random() < NAMED:
        case.body["model"] = model
    if "{id}" in case.path and _kept and dice.random() < NAMED:
        case.path_parameters["id"] = _kept[-1]
    if "{model}" in case.path and dice.random() < NAMED:
        case.path_parameters["model"] = model


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    _told[f"{case.method} {case.path} {response.status_code}"] += 1
    is_json = response.headers.get("content-type", [""])[0].startswith("application/json")
    if case.path == "/v1/responses" and response.status_code == 200 and is_json:
        _kept.append(json.loads(response.content)["id"])


@schemathesis.check
def answers_as_it_should(context: Any, response: Any, case: Any) -> None:
    headers = {name.lower(): values[0] for name, values in response.headers.items()}
    is_head = case.method.upper() == "HEAD"
    wrong = complaint(case.path, response.status_code, headers, response.content, is_head=is_head)
    assert not wrong, wrong


@atexit.register
def _tell() -> None:
    Path(os.environ["FUZZ_TALLY"]).write_text(json.dumps(_told))
