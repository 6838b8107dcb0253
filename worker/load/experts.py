"""Experts from disk: which models have them, and how a network is opened with a part of them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.common.expert_plan import ExpertPlan, TensorPlace
from protocol.tasks import Task
from worker.interfaces import ModelError
from worker.load.config import ModelConfig, in_mlx_lm

if TYPE_CHECKING:
    from worker.load.weights import Open
    from worker.runner.experts import ExpertMemory


def require_experts(config: ModelConfig, task: Task, *, text_only: bool) -> None:
    """Raise `ModelError` for models whose experts are never read from disk."""
    if task != "generate":
        raise ModelError("it generates no text: leave --experts-memory out.")
    if not in_mlx_lm(config):
        raise ModelError("only mlx-vlm implements it: leave --experts-memory out.")
    if config.kind == "vision" and not text_only:
        raise ModelError("the experts of a vision model are read from disk only with --text-only.")


def open_network(plan: ExpertPlan, folder: Path) -> tuple[Any, ExpertMemory, Open, int]:
    """Open mlx-lm's network with slabs, its weights not evaluated yet. Return also what reads its experts,
    how to open it again with the same, and its number of parameters. Raises what upstream raises."""
    from mlx_lm.utils import get_total_parameters

    from worker.load.weights import open_text

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
    from worker.runner.experts import (
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
