"""A report for others: the machine, versions, findings; no name of a person, host or folder. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deploy.machine.doctor import Finding
from deploy.machine.facts import MachineFacts
from protocol.types import ModelReport

_WITH_PATHS = ("models here", "sockets")
"""Findings that name folders."""


def of_machine(facts: MachineFacts) -> dict[str, Any]:
    """Return what a figure depends on: the machine, its memory in bytes, MLX's device, and versions."""
    return {
        "machine": {
            "system": f"{facts.system} {facts.release}",
            "processor": facts.machine,
            "cores": facts.cores,
            "memory": facts.memory.total,
            "memory_for_models": facts.memory.for_model,
            "device": facts.mlx,
            "device_info": dict(facts.mlx_info),
        },
        "versions": {"python": ".".join(map(str, facts.python)), **facts.versions},
    }


def of_findings(findings: Sequence[Finding], home: str) -> list[dict[str, str]]:
    """Return verdict and text of each finding but those that name folders. Errors may name the user's `home`
    too, which becomes `~`."""
    return [
        {"verdict": found.verdict.value, "about": found.about, "text": found.text.replace(home, "~")}
        for found in findings
        if found.about not in _WITH_PATHS
    ]


def of_passes(model: str, found: ModelReport) -> dict[str, Any]:
    """Return what was measured of a model. Of a folder's path, only the last part is told."""
    return {"model": last_part(model), **msgspec.to_builtins(found)}


def of_server(model: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a served model's name, and its facts of `GET /v1/status` if there are any."""
    for worker in status.get("workers", []):
        if worker["model"] == model:
            facts = ("parameters", "context_length", "cache_bytes_max", "start_s", "plan", "memory")
            return {"model": last_part(model), **{name: worker.get(name) for name in facts}}
    return {"model": last_part(model)}


def last_part(model: str) -> str:
    """Return a model's id as it is, and of a path its last part."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith((".", "/", "~")) else model
