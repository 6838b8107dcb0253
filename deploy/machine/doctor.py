"""What there is to be said of the facts: each in a line, and what to do where something is wrong. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.machine.facts import Facts
from deploy.machine.suggestions import that_fit

MACOS_MIN = 14
FILES_MIN = 1024
DISK_LOW_BYTES = 20 * 10**9
_GB = 10**9


class Verdict(enum.Enum):
    """`WRONG`: it will not work so; `NOTE`: it could be better."""

    WELL = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice`: what to do; empty: nothing."""

    verdict: Verdict
    about: str
    told: str
    advice: str = ""


def examine(facts: Facts) -> list[Finding]:
    """All there is to say, in an order in which it can be mended."""
    return [
        *_programs(facts),
        *_memory(facts),
        *_models(facts),
        *_places(facts),
    ]


def _programs(facts: Facts) -> Iterator[Finding]:
    python = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        yield Finding(Verdict.WRONG, "Python", python, "3.11 or newer is needed: make PYTHON=python3.12 …")
    else:
        yield Finding(Verdict.WELL, "Python", python)
    yield _system(facts)
    if facts.mlx:
        yield Finding(Verdict.WELL, "MLX", f"computes on {facts.mlx}")
    else:
        yield Finding(Verdict.WRONG, "MLX", facts.mlx_error, "install it again: rm -r .venv, then make serve")
    if facts.system == "Linux" and not facts.has_compiler:
        advice = "apt install g++: kernels are fused then, and decoding is a little faster"
        yield Finding(Verdict.NOTE, "compiler", "there is no g++", advice)


def _system(facts: Facts) -> Finding:
    told = f"{'macOS' if facts.system == 'Darwin' else facts.system} {facts.release}, {facts.machine}"
    if facts.system != "Darwin":
        return Finding(Verdict.WELL, "system", told)
    if facts.machine != "arm64":
        advice = "MLX needs Apple silicon, and a Python that is not run by Rosetta"
        return Finding(Verdict.WRONG, "system", told, advice)
    major = facts.release.partition(".")[0]
    if major.isdigit() and int(major) < MACOS_MIN:
        return Finding(Verdict.WRONG, "system", told, f"update to macOS {MACOS_MIN} or newer: MLX needs it")
    return Finding(Verdict.WELL, "system", told)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    told = f"{_gb(memory.total)}, of which {_gb(memory.for_model)} for a model and its caches"
    advice = ""
    if facts.system == "Darwin" and memory.wired_limit is None:
        more = int(memory.total * 0.85) // 2**20
        advice = f"more of it for models, until the next start: sudo sysctl iogpu.wired_limit_mb={more}"
    yield Finding(Verdict.WELL, "memory", told, advice)
    if fits := that_fit(memory.for_model):
        best, context = fits[0]
        told = f"for one, {best.id} ({_gb(best.weight_bytes)}), with {context:,} tokens of context"
        yield Finding(Verdict.WELL, "models that fit", told, "`roundhouse pull` names more")
    else:
        yield Finding(Verdict.NOTE, "models that fit", "only the embedded one", "more memory is needed")


def _models(facts: Facts) -> Iterator[Finding]:
    told = f"{facts.models} in {facts.cache}, {_gb(facts.model_bytes)}"
    if facts.cache_writable:
        yield Finding(Verdict.WELL, "models here", told)
    else:
        advice = f"make it yours (chown), or set HF_HUB_CACHE to a folder that is: {facts.cache}"
        yield Finding(Verdict.WRONG, "models here", f"{told}, which you may not write to", advice)
    left = f"{_gb(facts.disk_free)} left"
    if facts.disk_free < DISK_LOW_BYTES:
        yield Finding(Verdict.NOTE, "disk", left, "`roundhouse rm` removes models")
    else:
        yield Finding(Verdict.WELL, "disk", left)


def _places(facts: Facts) -> Iterator[Finding]:
    about = f"port {facts.port}"
    match facts.port_user:
        case "":
            yield Finding(Verdict.WELL, about, "free")
        case "roundhouse":
            yield Finding(Verdict.WELL, about, "a Roundhouse serves there", "`roundhouse status` shows it")
        case user:
            yield Finding(Verdict.NOTE, about, f"taken by {user}", "roundhouse serve --port …")
    if facts.runtime_error:
        advice = "set XDG_RUNTIME_DIR to a folder of your own, with a short path"
        yield Finding(Verdict.WRONG, "sockets", facts.runtime_error, advice)
    if facts.files_max < FILES_MIN:
        told = f"{facts.files_max} at the most"
        yield Finding(Verdict.NOTE, "open files", told, f"ulimit -n {FILES_MIN * 4}, for many clients")
    if not facts.keeps_awake:
        advice = "it may fall asleep in the middle of work"
        yield Finding(Verdict.NOTE, "sleep", "there is no caffeinate", advice)


def _gb(count: int) -> str:
    return f"{count / _GB:.1f} GB"
