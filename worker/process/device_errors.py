"""Errors of the GPU that end the process, recognized by MLX's messages.

Metal runs a command buffer after the call that submitted it, so MLX raises its error at a later call (mlx
3523): it belongs to no request, arrays that it should have filled stay empty, and what followed it on the
stream fails as well. An allocation that fails raises at once, in the call that asked for it, and is a plain
error of that request. The same holds for CUDA.
"""

from __future__ import annotations

import re

_FAILED = re.compile(r"\[METAL\] Command buffer execution failed|\bcu(?:da)?[A-Z]\w*\(.*\) failed: ")
_NO_MEMORY = re.compile(r"Insufficient Memory|OutOfMemory")
_REFUSED = re.compile(r"\) failed: out of memory")
"""CUDA's refusal of an allocation."""


class DeviceError(BaseException):
    """The GPU has failed, and the process must end: it cannot be trusted with another step.

    `is_out_of_memory`: for want of memory. Not an `Exception`, so that no handler between here and the
    thread's end catches it.
    """

    def __init__(self, message: str, *, is_out_of_memory: bool) -> None:
        super().__init__(message)
        self.is_out_of_memory = is_out_of_memory


def raise_if_device_failed(error: BaseException) -> None:
    """Raise `DeviceError` if `error` is one of the GPU: first in each handler of the engine's errors."""
    text = str(error).strip()
    if not isinstance(error, RuntimeError) or not _FAILED.search(text) or _REFUSED.search(text):
        return
    is_out_of_memory = _NO_MEMORY.search(text) is not None
    what = "ran out of memory" if is_out_of_memory else "failed"
    raise DeviceError(f"the GPU {what}: {text.splitlines()[0]}", is_out_of_memory=is_out_of_memory) from error
