"""The exactness table of `doctor`: a model's batched passes, compared with passes of one row."""

from __future__ import annotations

import subprocess

import msgspec

from deploy.serving.commandlines import python_module
from protocol.types import Exactness, PassCheck

MEASURE_S_MAX = 1800.0
"""Maximum duration of loading and measuring a model."""


class MeasurementError(Exception):
    """The model could not be measured; the message says why."""


def measure(model: str) -> Exactness:
    """Load the model in a process of its own and measure it. Raises `MeasurementError`."""
    command = [*python_module("worker.exactness"), model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_S_MAX)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"{model} was not measured within {MEASURE_S_MAX:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MeasurementError(lines[-1] if lines else f"its process ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Exactness)


def lines(found: Exactness) -> list[tuple[str, str, str]]:
    """Return the table: the kind of pass, its verdict as in `doctor`, and what was found."""
    table = [
        (_pass(check), "ok" if check.differs_at is None else "note", result(check)) for check in found.checks
    ]
    if not found.is_complete:
        table.append(("the rest", "note", "not measured for lack of time"))
    return table + [("chip", "wrong", why) for why in found.chip]


def _pass(check: PassCheck) -> str:
    rows = "1 row" if check.rows == 1 else f"{check.rows} rows"
    match check.kind:
        case "decode":
            return f"decode, {rows}"
        case "verify":
            return f"verify, {rows} × {check.tokens} tokens"
        case "prompts":
            return f"{check.rows} prompts together"
        case "chunks":
            return f"prompt in chunks of {check.tokens}"


def result(check: PassCheck) -> str:
    """Return what was found, in a few words."""
    if check.is_exact:
        return "equal"
    if check.differs_at is None:
        return f"same tokens, logprobs differ by up to {check.difference:.1g}"
    return f"token {check.differs_at} differs, logprobs by up to {check.difference:.1g}"
