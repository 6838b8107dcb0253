"""Several processes that train one model: each draws batches of its own, and their gradients are averaged.

`torchrun --nproc-per-node N` starts them. Alone, a process is the first of one, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def join() -> None:
    """Meet the others, if there are any."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")


def number() -> int:
    """Which of the processes this is; 0, the first, writes the files."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    """Until all others are here, too."""
    if dist.is_initialized():
        dist.barrier()


def agree(model: torch.nn.Module) -> None:
    """All begin with the weights of the first."""
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Each process has seen its own batch; a parameter that none of them has used keeps no gradient."""
    if not dist.is_initialized():
        return
    learning = list(parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in learning]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= count()
    for parameter, part in zip(learning, flat.split([p.numel() for p in learning]), strict=True):
        parameter.grad = part.view_as(parameter) if part.any() else None
