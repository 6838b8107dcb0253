"""Diagnosis of a machine's facts: one line per finding, with advice for problems. Pure."""

from __future__ import annotations

import enum
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deploy.machine.facts import MachineFacts
from deploy.machine.suggestions import fit_with_experts_on_disk, models_that_fit
from deploy.serving import commandlines
from deploy.serving.resolution import resolve
from protocol.common.error_text import in_bytes
from protocol.types import Capabilities, ContextFit, Exactness, ModelReport, PassCheck

MACOS_MIN = 14
FILES_MIN = 1024
DISK_LOW_BYTES = 20 * 10**9
_GB = 10**9


class Verdict(enum.Enum):
    """Verdict of a finding. `WRONG`: it will not work; `NOTE`: it could be better."""

    WELL = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis. `advice`: what to do; empty: nothing."""

    verdict: Verdict
    about: str
    text: str
    advice: str = ""


def examine(facts: MachineFacts) -> list[Finding]:
    """Return all findings, in the order in which they can be fixed."""
    return [
        *_programs(facts),
        *_memory(facts),
        *_models(facts),
        *_places(facts),
    ]


def _programs(facts: MachineFacts) -> Iterator[Finding]:
    python = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        yield Finding(Verdict.WRONG, "Python", python, "3.11 or newer is needed: make PYTHON=python3.12 …")
    else:
        yield Finding(Verdict.WELL, "Python", python)
    yield _system(facts)
    yield _mlx(facts)
    if facts.system == "Linux" and not facts.has_compiler:
        advice = "apt install g++: MLX can then fuse kernels, which makes decoding a little faster"
        yield Finding(Verdict.NOTE, "compiler", "g++ is not installed", advice)


def _mlx(facts: MachineFacts) -> Finding:
    if not facts.mlx:
        advice = "reinstall it: pip install --force-reinstall mlx, or rm -r .venv and make serve"
        return Finding(Verdict.WRONG, "MLX", facts.mlx_error, advice)
    if facts.cuda_package and "cpu" in facts.mlx:
        # The packages for CPUs and for CUDA contain a file of the same name; the last one installed counts.
        text = f"uses {facts.mlx}, although {facts.cuda_package} is installed"
        advice = f"if nvidia-smi shows a GPU: pip install --force-reinstall --no-deps {facts.cuda_package}"
        return Finding(Verdict.WRONG, "MLX", text, advice)
    return Finding(Verdict.WELL, "MLX", f"uses {facts.mlx}")


def _system(facts: MachineFacts) -> Finding:
    text = f"{'macOS' if facts.system == 'Darwin' else facts.system} {facts.release}, {facts.machine}"
    if facts.system != "Darwin":
        return Finding(Verdict.WELL, "system", text)
    if facts.machine != "arm64":
        advice = "MLX needs Apple silicon, and a Python that does not run under Rosetta"
        return Finding(Verdict.WRONG, "system", text, advice)
    major = facts.release.partition(".")[0]
    if major.isdigit() and int(major) < MACOS_MIN:
        return Finding(Verdict.WRONG, "system", text, f"MLX needs macOS {MACOS_MIN} or newer")
    return Finding(Verdict.WELL, "system", text)


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    memory = facts.memory
    text = f"{_gb(memory.total)}, of which a model and its caches can use {_gb(memory.for_model)}"
    advice = ""
    if facts.system == "Darwin" and memory.wired_limit is None:
        more = int(memory.total * 0.85) // 2**20
        advice = f"to use more for models, until the next boot: sudo sysctl iogpu.wired_limit_mb={more}"
    yield Finding(Verdict.WELL, "memory", text, advice)
    if fits := models_that_fit(memory.for_model):
        best = fits[0].model
        text = f"for example {best.id} ({_gb(best.weight_bytes)}), with {fits[0].context:,} tokens of context"
        yield Finding(Verdict.WELL, "models that fit", text, "`roundhouse models` lists more")
    else:
        yield Finding(Verdict.NOTE, "models that fit", "only the embedded one", "others need more memory")
    if larger := fit_with_experts_on_disk(memory.for_model):
        model, experts_memory = larger
        text = (
            f"{model.id} ({_gb(model.weight_bytes)}), slower: --experts-memory {experts_memory // 2**30}GiB"
        )
        yield Finding(Verdict.WELL, "experts on disk", text)


def _models(facts: MachineFacts) -> Iterator[Finding]:
    text = f"{facts.models} in {facts.cache}, {_gb(facts.model_bytes)}"
    if facts.cache_writable:
        yield Finding(Verdict.WELL, "models here", text)
    else:
        advice = f"make it writable (chown {facts.cache}), or set HF_HUB_CACHE to a folder that is"
        yield Finding(Verdict.WRONG, "models here", f"{text}, which is not writable", advice)
    left = f"{_gb(facts.disk_free)} free"
    if facts.disk_free < DISK_LOW_BYTES:
        yield Finding(Verdict.NOTE, "disk", left, "`roundhouse rm` removes models")
    else:
        yield Finding(Verdict.WELL, "disk", left)


def _places(facts: MachineFacts) -> Iterator[Finding]:
    about = f"port {facts.port}"
    match facts.port_user:
        case "":
            yield Finding(Verdict.WELL, about, "free")
        case "roundhouse":
            yield Finding(Verdict.WELL, about, "in use by a Roundhouse", "`roundhouse status` shows it")
        case user:
            yield Finding(Verdict.NOTE, about, f"in use by {user}", "use another: roundhouse serve --port …")
    if facts.runtime_error:
        advice = "set XDG_RUNTIME_DIR to a private folder with a short path"
        yield Finding(Verdict.WRONG, "sockets", facts.runtime_error, advice)
    if facts.files_max < FILES_MIN:
        text = f"limit {facts.files_max}"
        yield Finding(Verdict.NOTE, "open files", text, f"for many clients: ulimit -n {FILES_MIN * 4}")
    if not facts.keeps_awake:
        advice = "the machine may fall asleep while requests are in flight"
        yield Finding(Verdict.NOTE, "sleep", "caffeinate is not installed", advice)


def _gb(count: int) -> str:
    return f"{count / _GB:.1f} GB"


# What `doctor` says of a model: its batched passes, compared with passes of one row, and the context that
# fits into memory.

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
    if found.rows_max is not None:
        drafts = f"drafts of up to {found.draft_tokens_max} tokens" if found.draft_tokens_max else "no drafts"
        table.append(("with --exact", "ok", f"at most {found.rows_max} rows in a pass, {drafts}"))
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
