"""Collection of the facts that `doctor` examines: versions, memory, folders, ports, programs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from deploy.machine import hub
from deploy.serving import preflight
from protocol import sockets
from protocol.common.cuda_build import cuda_package

_PACKAGES = ("mlx-roundhouse", "mlx", "mlx-metal", "mlx-lm", "mlx-vlm", "transformers")
MLX_S_MAX = 60.0
HEALTH_S_MAX = 2.0
_TRY_MLX = """import json
import mlx.core as mx
mx.eval(mx.ones(4) + 1)
print(mx.default_device())
print(json.dumps(mx.device_info()))"""
"""Prints MLX's device and what MLX knows of it."""

HEADROOM = 0.1
"""Default share that a worker leaves free."""

_GB = 10**9
_SMALL_MAC_BYTES = 36 * 2**30
SYSCTL_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory in bytes. `usable`: the part of `total` that the GPU may use. `wired_limit`: None if not set."""

    total: int
    usable: int
    wired_limit: int | None = None

    @property
    def for_model(self) -> int:
        """Memory for weights and caches together."""
        return int(self.usable * (1 - HEADROOM))


def usable_of_mac(total: int, wired_limit: int | None) -> int:
    """Return the GPU's limit on macOS: by default two thirds, above 36 GiB three quarters."""
    if wired_limit:
        return min(total, wired_limit)
    return total * 2 // 3 if total <= _SMALL_MAC_BYTES else total * 3 // 4


def read_memory(platform: str = sys.platform, gpu_bytes: int = 0) -> MachineMemory:
    """Return the current state. `gpu_bytes`: memory of a GPU that has its own, which counts instead."""
    if gpu_bytes:
        return MachineMemory(gpu_bytes, gpu_bytes)
    total = int(psutil.virtual_memory().total)
    if platform != "darwin":
        return MachineMemory(total, total)
    wired = _wired_limit()
    return MachineMemory(total, usable_of_mac(total, wired), wired)


def chip_name(platform: str = sys.platform) -> str:
    """Return the name of a Mac's chip, such as `Apple M4 Pro`; empty elsewhere."""
    return _sysctl("machdep.cpu.brand_string") if platform == "darwin" else ""


def _wired_limit() -> int | None:
    """Return `sysctl iogpu.wired_limit_mb` in bytes; None if it is not set or does not exist."""
    limit = _sysctl("iogpu.wired_limit_mb")
    return int(limit) * 2**20 if limit.isdigit() and int(limit) else None


def _sysctl(name: str) -> str:
    """Return a value of the system; empty if it does not exist."""
    try:
        return subprocess.run(
            ["sysctl", "-n", name],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SYSCTL_S_MAX,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `name`: empty if MLX does not work, and `error` says why. `info`: what MLX knows
    of it."""

    name: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def own_bytes(self) -> int:
        """Bytes of a GPU with memory of its own; 0: it has none."""
        return int(self.info.get("total_memory", 0)) if "gpu" in self.name else 0


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about this machine. `mlx`: MLX's device; empty: MLX does not work, and `mlx_error` says why.
    `cuda_package`: that of MLX's CUDA build; empty: none. `port_user`: the listener at `port`: none (empty),
    `roundhouse`, or `another program`. `cache_writable`: whether the models' folder, or its nearest existing
    parent, is writable. `runtime_error`: why there is no folder for sockets."""

    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    release: str = ""
    machine: str = ""
    memory: MachineMemory = field(default_factory=lambda: MachineMemory(0, 0))
    mlx: str = ""
    mlx_error: str = ""
    mlx_info: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    cuda_package: str = ""
    port: int = 8000
    port_user: str = ""
    runtime_error: str = ""
    cache: str = ""
    cache_writable: bool = True
    disk_free: int = 0
    models: int = 0
    model_bytes: int = 0
    files_max: int = 0
    has_compiler: bool = True
    keeps_awake: bool = True


def gather(host: str, port: int, environ: Mapping[str, str] = os.environ) -> MachineFacts:
    """Collect the facts. This takes a few seconds, because MLX is tried in a separate process."""
    device = _try_mlx()
    held = hub.held()
    home = _existing(hub.folder())
    return MachineFacts(
        python=sys.version_info[:3],
        system=platform.system(),
        release=platform.mac_ver()[0] or platform.release(),
        machine=platform.machine(),
        memory=read_memory(gpu_bytes=device.own_bytes),
        mlx=device.name,
        mlx_error=device.error,
        mlx_info=device.info,
        versions=_versions(),
        cores=os.cpu_count() or 0,
        cuda_package=cuda_package(),
        port=port,
        port_user=listening_process(host, port),
        runtime_error=_runtime_error(),
        cache=str(hub.folder()),
        cache_writable=os.access(home, os.W_OK),
        disk_free=shutil.disk_usage(home).free,
        models=len(held),
        model_bytes=sum(model.bytes for model in held),
        files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        has_compiler=shutil.which("g++") is not None or shutil.which("c++") is not None,
        keeps_awake=sys.platform != "darwin" or shutil.which("caffeinate") is not None,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def listening_process(host: str, port: int) -> str:
    """Return the listener at a port: none (empty), `roundhouse`, or `another program`."""
    try:
        with socket.create_connection((host, port), HEALTH_S_MAX):
            pass
    except OSError:
        return ""
    return "roundhouse" if preflight.is_ours(host, port) else "another program"


def gpu_bytes() -> int:
    """Return the bytes of a GPU with memory of its own; 0: there is none. Where MLX's CUDA build is installed
    this takes a few seconds."""
    return _try_mlx().own_bytes if cuda_package() else 0


def _try_mlx() -> Device:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_MLX],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=MLX_S_MAX,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Device(error=str(error))
    if done.returncode:
        words = done.stderr.strip().splitlines()
        return Device(error=words[-1] if words else "it crashes")
    name, info = done.stdout.rstrip("\n").split("\n")[-2:]
    return Device(name, json.loads(info))


def _runtime_error() -> str:
    try:
        sockets.runtime_directory()
    except (sockets.EndpointError, OSError) as error:
        return str(error)
    return ""


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
