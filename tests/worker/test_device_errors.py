"""Messages of MLX that say that the GPU has failed, as its sources have them."""

from __future__ import annotations

import pytest

from worker.process.device_errors import DeviceError, raise_if_device_failed

METAL = "[METAL] Command buffer execution failed: {}."


@pytest.mark.parametrize(
    ("text", "is_out_of_memory"),
    [
        (METAL.format("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"), True),
        (METAL.format("Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"), False),
        ("cudaGraphLaunch(graph, stream) failed: an illegal memory access was encountered", False),
    ],
)
def test_an_error_of_the_gpu_is_told_with_its_reason(text: str, is_out_of_memory: bool) -> None:
    with pytest.raises(DeviceError) as raised:
        raise_if_device_failed(RuntimeError(f"\n{text}\nmore"))
    assert raised.value.is_out_of_memory is is_out_of_memory
    assert str(raised.value).endswith(text)
    assert not isinstance(raised.value, Exception)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[malloc] Unable to allocate 99 bytes."),
        RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum"),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("There is no Stream(gpu, 3) in current thread."),
        ValueError(METAL.format("quoted by a client")),
    ],
)
def test_other_errors_are_those_of_a_request(error: Exception) -> None:
    raise_if_device_failed(error)
