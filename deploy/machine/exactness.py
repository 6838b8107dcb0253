"""What `doctor` says of a model: its batched passes, compared with passes of one row, and the context that
fits into memory."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from deploy.serving import commandlines
from deploy.serving.resolution import resolve
from protocol.common.error_text import in_bytes
from protocol.types import Capabilities, ContextFit, Exactness, ModelReport, PassCheck

MEASURE_S_MAX = 1800.0
"""Maximum duration of loading and measuring a model."""


class MeasurementError(Exception):
    """The model could not be measured; the message says why."""


def flags_of(model: str, flags: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the flags that the worker of a model would have: of a table of the settings file, or named as
    `--model` names one. Raises `SettingsError` or `EndpointError`."""
    resolved = resolve(flags, environ)
    if model not in resolved.for_workers:
        resolved = resolve([*commandlines.flag_words("model", model), *flags], environ)
        model = resolved.models[0].name
    return commandlines.flags_of(resolved.for_workers[model], resolved.config)


def measure(model: str, flags: Sequence[str], environ: Mapping[str, str]) -> ModelReport:
    """Load the model in a process of its own and measure it. `flags`: as for `flags_of`. Raises
    `MeasurementError`, and as `flags_of`."""
    command = [*commandlines.python_module("worker.exactness"), *flags_of(model, flags, environ)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=MEASURE_S_MAX,
            env=dict(environ),
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"{model} was not measured within {MEASURE_S_MAX:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MeasurementError(lines[-1] if lines else f"its process ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout.rstrip("\n").split("\n")[-1], type=ModelReport)


def context(found: ContextFit) -> tuple[str, str]:
    """Return the verdict as in `doctor` of the context that fits, and a sentence."""
    row, whole = in_bytes(found.row_bytes), in_bytes(found.cache_bytes)
    text = (
        f"{found.tokens:,} of {found.context_length:,} tokens fit for one request ({row} of {whole} for"
        f" KV caches), {found.tokens_max:,} for all together"
    )
    return "ok" if found.tokens >= found.context_length else "note", text


def output(found: Capabilities) -> list[tuple[str, str, str]]:
    """Return what was found of the model's template and output: verdict, subject, sentence."""
    if found.template_problem:
        return [("wrong", "template", found.template_problem)]
    wants = ", ".join(found.layout)
    table = [("ok", "template", f"wants {wants}" if wants else "wants nothing unusual")]
    if found.image_problem:
        table.append(("note", "images", f"not served: {found.image_problem}"))
    if not found.unread:
        return [
            *table,
            ("ok", "output", "all that the template writes of an answer is recognized"),
        ]
    kinds = " and ".join(kind.replace("_", " ") for kind in found.unread)
    advice = "--tool-call-parser and --reasoning-parser name a format"
    return [*table, ("note", "output", f"{kinds} are in an unknown format, and will be text: {advice}")]


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
