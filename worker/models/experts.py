"""Plan of experts from disk: which tensors of the weight files are experts, and how many of them stay.

Only files that mlx-lm has written are used: there, a tensor has the name of its parameter, and the experts of
a layer are stacked, so that each is one contiguous part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.tasks import Task
from worker.contract.engine import ModelError
from worker.models.config import ModelConfig, reads
from worker.models.explain import in_bytes

if TYPE_CHECKING:
    from worker.engine.experts import ExpertMemory
    from worker.models.probes.network import Open

_EXPERTS = re.compile(
    r"(.+)\.((?:gate_proj|up_proj|down_proj|fc1|fc2)\.(?:weight|scales|biases|bias|global_scale))"
)
_HEADER_BYTES_MAX = 100 * 2**20


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


def require_experts(config: ModelConfig, task: Task, *, text_only: bool) -> None:
    """Raise `ModelError` for models whose experts are never read from disk."""
    if task != "generate":
        raise ModelError("it generates no text: leave --experts-memory out.")
    if not reads(config):
        raise ModelError("only mlx-vlm implements it: leave --experts-memory out.")
    if config.kind == "vision" and not text_only:
        raise ModelError("the experts of a vision model are read from disk only with --text-only.")


def plan_experts(files: Sequence[Path], limit: int) -> ExpertPlan | None:
    """Return the plan for `limit` bytes of experts; None: all fit. Raises `ModelError`."""
    plan = plan_all(files)
    slots = limit // (plan.all_bytes // plan.experts)
    if slots < 1:
        raise ModelError(
            f"--experts-memory is {in_bytes(limit)}, and one expert of each layer takes "
            f"{in_bytes(plan.all_bytes // plan.experts)}: set at least that."
        )
    return None if slots >= plan.experts else replace(plan, slots=slots)


def plan_all(files: Sequence[Path]) -> ExpertPlan:
    """Return the plan with slots for all experts. Raises `ModelError` if they cannot be read from disk."""
    layers = _layers(files)
    if not layers:
        raise ModelError("it has no stacked experts in mlx-lm's layout: leave --experts-memory out.")
    counts = {tensor.shape[0] for parts in layers.values() for tensor in parts.values()}
    if len(counts) != 1:
        raise ModelError("its layers have different numbers of experts: leave --experts-memory out.")
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
    """Return the tensors of a safetensors file of mlx's. Raises `ModelError` if it is damaged."""
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
        raise ModelError(f"{file} cannot be read ({error}). Download the model again.") from None
    end = max((tensor.at + tensor.nbytes for tensor in tensors.values()), default=0)
    if size < end:
        raise ModelError(f"{file} is truncated: it has {size} of {end} bytes. Download the model again.")
    if metadata.get("format") != "mlx":
        raise ModelError(
            f"{file.name} was not written by mlx-lm, and experts are read only from files that were: "
            "convert the model (mlx_lm.convert), or leave --experts-memory out."
        )
    return tensors


def open_network(plan: ExpertPlan, folder: Path) -> tuple[Any, ExpertMemory, Open, int]:
    """Open mlx-lm's network with slabs, its weights not evaluated yet. Return also what reads its experts,
    how to open it again with the same, and its number of parameters. Raises what upstream raises."""
    from mlx_lm.utils import get_total_parameters

    from worker.models.probes.network import open_text

    network: Any = open_text(folder)
    parameters = int(get_total_parameters(network))
    memory = attach(plan, network)

    def again(folder: Path) -> Any:
        other = open_text(folder)
        memory.attach(other)
        return other

    return network, memory, again, parameters


def attach(plan: ExpertPlan, network: Any) -> ExpertMemory:
    """Replace the experts of a network whose weights are not evaluated yet by slabs, and return what reads
    them. Raises `ModelError` if it does not use its experts as upstream's layers do."""
    from worker.engine.experts import (
        STREAMED,
        ExpertMemory,
        ExpertPart,
        ExpertStore,
        ResidentExperts,
        WeightFile,
    )

    modules = {path: module for path, module in network.named_modules() if type(module) in STREAMED}
    if set(modules) != set(plan.layers):
        odd = min(set(modules) ^ set(plan.layers))
        raise ModelError(f"its experts in {odd} cannot be read from disk: leave --experts-memory out.")
    memory = ExpertMemory(plan.slots, plan.experts, plan.resident_bytes)
    opened: dict[Path, WeightFile] = {}
    for path, tensors in plan.layers.items():
        parts = []
        for name, tensor in tensors.items():
            file = opened.setdefault(tensor.file, WeightFile(tensor.file))
            slab = _slab(path, name, modules[path], tensor, plan)
            parts.append(ExpertPart(slab, file, tensor.at, tensor.nbytes // plan.experts))
        resident = ResidentExperts(plan.experts, plan.slots)
        memory.stores[path] = ExpertStore(resident, parts, memory.counters)
    memory.attach(network)
    return memory


def _slab(path: str, name: str, module: Any, tensor: TensorPlace, plan: ExpertPlan) -> memoryview:
    """Replace a parameter by its slab; return the slab's bytes."""
    import mlx.core as mx

    layer, _, parameter = name.partition(".")
    held = module.get(layer, {})
    array = held.get(parameter)
    if array is None or tuple(array.shape) != tensor.shape or array.nbytes != tensor.nbytes:
        raise ModelError(f"{path}.{name} is not what its file holds: leave --experts-memory out.")
    slab: Any = mx.zeros((plan.slots, *tensor.shape[1:]), array.dtype)
    mx.eval(slab)
    held[parameter] = slab
    view = memoryview(slab).cast("B")
    if view.readonly or len(view) != tensor.nbytes // plan.experts * plan.slots:
        raise ModelError("this device's memory cannot be written from the host: leave --experts-memory out.")
    return view
