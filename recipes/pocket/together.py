"""Data-parallel training: processes draw separate batches and average their gradients.

`torchrun --nproc-per-node N` starts them. A process that is started alone is the only one, and exchanges
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def join() -> None:
    """Join the process group, if there is one."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")


def number() -> int:
    """Return the rank of this process; rank 0 writes the files."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    """Wait for all other processes."""
    if dist.is_initialized():
        dist.barrier()


def agree(model: torch.nn.Module) -> None:
    """Give all processes the weights of the first."""
    if dist.is_initialized():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average the gradients of all processes; a parameter that none of them used keeps no gradient."""
    if not dist.is_initialized():
        return
    learning = list(parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in learning]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= count()
    for parameter, part in zip(learning, flat.split([p.numel() for p in learning]), strict=True):
        parameter.grad = part.view_as(parameter) if part.any() else None
