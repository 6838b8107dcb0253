"""Plan of experts from disk: which tensors of the weight files are experts, and how many of them stay.

Only files that mlx-lm has written are used: there, a tensor has the name of its parameter, and the experts of
a layer are stacked, so that each is one contiguous part. Here, because the supervisor counts by the same plan
what the worker will hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protocol.common.error_text import in_bytes

_EXPERTS = re.compile(
    r"(.+)\.((?:gate_proj|up_proj|down_proj|fc1|fc2)\.(?:weight|scales|biases|bias|global_scale))"
)
_HEADER_BYTES_MAX = 100 * 2**20


class ExpertPlanError(Exception):
    """The experts of these files cannot be read from disk; the message says why."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a file: `at` is the position of its first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """`layers`: the tensors of each layer's experts, by the path of their module and their name within it.
    `experts`: of a layer; `slots`: how many of them are in memory."""

    layers: Mapping[str, Mapping[str, TensorPlace]]
    experts: int
    slots: int

    @property
    def all_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(tensor.nbytes for parts in self.layers.values() for tensor in parts.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of those in memory."""
        return self.all_bytes // self.experts * self.slots

    @property
    def saved_bytes(self) -> int:
        return self.all_bytes - self.resident_bytes

    @property
    def described(self) -> str:
        """The plan for the log."""
        part = f"{in_bytes(self.resident_bytes)} of {in_bytes(self.all_bytes)}"
        return f"{self.slots} of {self.experts} experts of each layer are in memory ({part})"


def plan_experts(files: Sequence[Path], limit: int) -> ExpertPlan | None:
    """Return the plan for `limit` bytes of experts; None: all fit. Raises `ExpertPlanError`."""
    plan = plan_all(files)
    slots = limit // (plan.all_bytes // plan.experts)
    if slots < 1:
        raise ExpertPlanError(
            f"--experts-memory is {in_bytes(limit)}, and one expert of each layer takes "
            f"{in_bytes(plan.all_bytes // plan.experts)}: set at least that."
        )
    return None if slots >= plan.experts else replace(plan, slots=slots)


def plan_all(files: Sequence[Path]) -> ExpertPlan:
    """Return the plan with slots for all experts. Raises `ExpertPlanError` if none can be read from disk."""
    layers = _layers(files)
    if not layers:
        raise ExpertPlanError("it has no stacked experts in mlx-lm's layout: leave --experts-memory out.")
    counts = {tensor.shape[0] for parts in layers.values() for tensor in parts.values()}
    if len(counts) != 1:
        raise ExpertPlanError("its layers have different numbers of experts: leave --experts-memory out.")
    [experts] = counts
    return ExpertPlan(layers, experts, experts)


def _layers(files: Sequence[Path]) -> dict[str, dict[str, TensorPlace]]:
    tensors: dict[str, TensorPlace] = {}
    for file in files:
        tensors |= read_header(file)
    layers: dict[str, dict[str, TensorPlace]] = {}
    for name, tensor in tensors.items():
        if found := _EXPERTS.fullmatch(name):
            layers.setdefault(found[1], {})[found[2]] = tensor
    return {
        path: parts
        for path, parts in sorted(layers.items(), key=lambda layer: _in_order(layer[0]))
        if all(len(tensor.shape) == 3 for name, tensor in parts.items() if name.endswith(".weight"))
    }


def _in_order(path: str) -> list[tuple[int, str]]:
    """Return a sorting key by which layer 10 follows layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in path.split(".")]


def read_header(file: Path) -> dict[str, TensorPlace]:
    """Return the tensors of a safetensors file of mlx's. Raises `ExpertPlanError` if it is damaged."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _HEADER_BYTES_MAX)))
        size = file.stat().st_size
        metadata: Any = header.pop("__metadata__", {})
        tensors = {
            name: TensorPlace(file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
            for name, entry in header.items()
            for first, last in [entry["data_offsets"]]
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ExpertPlanError(f"{file} cannot be read ({error}). Download the model again.") from None
    end = max((tensor.at + tensor.nbytes for tensor in tensors.values()), default=0)
    if size < end:
        raise ExpertPlanError(f"{file} is truncated: it has {size} of {end} bytes. Download the model again.")
    if metadata.get("format") != "mlx":
        raise ExpertPlanError(
            f"{file.name} was not written by mlx-lm, and experts are read only from files that were: "
            "convert the model (mlx_lm.convert), or leave --experts-memory out."
        )
    return tensors
