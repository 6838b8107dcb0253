"""Starts the processes of all ranks but the first: those of this machine as its children, others over ssh.

Over ssh by upstream's own `RemoteProcess`, the way `mlx.launch` goes: it is private there, so a test holds
it. None outlives the first rank: its children have a lifeline and its process group, a remote one loses its
terminal when ssh ends, and all of them end when the line to the first rank does.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from protocol import lifeline, logbook, startline
from protocol.hosts import Backend, Host, Hosts
from protocol.workersettings import WorkerSettings
from worker.preload import GUARD
from worker.ranks import place

log = logging.getLogger(__name__)

_TOLD = (
    "model",
    "served_name",
    "task",
    "text_only",
    "curve_keys",
    "memory_limit_bytes",
    "memory_budget",
    "memory_headroom",
    "split",
    "join_timeout",
    "log_format",
    "log_level",
)
"""Of the first rank's settings, those that every rank has."""
_SPINNING = "MLX_METAL_FAST_SYNCH"
"""Which hostfiles of upstream's set: a GPU that waits by spinning takes a core while nobody asks anything."""
_OWN = (lifeline.VARIABLE, startline.VARIABLE, startline.SPARE, logbook.VARIABLE, GUARD, "ROUNDHOUSE_CONFIG")
"""What of the first rank's environment is not for the others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to start, and what they are told of each other. `port`: the first of those of the backend."""

    hosts: Hosts
    backend: Backend
    port: int

    def files(self) -> dict[str, str]:
        """The contents of files, each under the variable that names it."""
        if self.backend == "ring":
            return {place.RING: json.dumps(self.hosts.ring(self.port))}
        return {place.DEVICES: json.dumps(self.hosts.devices())}

    def variables(self, endpoint: str) -> dict[str, str]:
        """All others. `endpoint`: where the first rank calls from."""
        told = dict(each.partition("=")[::2] for each in self.hosts.envs)
        told.pop(_SPINNING, None)
        if self.backend == "jaccl":
            told[place.COORDINATOR] = f"{self.hosts.hosts[0].ips[0]}:{self.port}"
        return told | {place.LINE: endpoint}


class Others:
    """Their processes, for as long as this one runs."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[Host, subprocess.Popen[bytes]]] = {}
        self._lifeline: int | None = None
        self._folder: Path | None = None

    def start(
        self, plan: Plan, endpoint: str, settings: WorkerSettings, environ: MutableMapping[str, str]
    ) -> None:
        """All of them; `environ` tells this process its own place afterwards. Raises `OSError`."""
        variables = plan.variables(endpoint)
        folder = self._folder = Path(tempfile.mkdtemp(prefix="roundhouse-ranks-"))
        files = {}
        for name, content in plan.files().items():
            files[name] = str(folder / name)
            Path(files[name]).write_text(content)
        reader, self._lifeline = os.pipe()
        try:
            for rank, host in enumerate(plan.hosts.hosts[1:], start=1):
                command = [host.python or sys.executable, *_module(), *words(settings)]
                if host.is_here:
                    told = {
                        **_bare(environ),
                        **variables,
                        **files,
                        place.RANK: str(rank),
                        place.FIRST: str(os.getpid()),
                    }
                    self._processes[rank] = host, _begin(command, told, reader)
                else:
                    self._processes[rank] = host, _begin_remote(rank, host, command, plan, variables)
        finally:
            os.close(reader)
        environ.update(variables | files | {place.RANK: "0"})

    def ended(self) -> str | None:
        """The first that has ended, in words."""
        for rank, (host, process) in self._processes.items():
            if (status := process.poll()) is not None:
                return f"rank {rank} on {host.ssh} has ended with status {status}"
        return None

    def name(self, rank: int) -> str:
        found = self._processes.get(rank)
        return f"rank {rank} on {found[0].ssh}" if found else f"rank {rank}"

    def tidy(self) -> None:
        """All have joined: nobody reads what was written for them any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """At once; also those that are stopped."""
        for _, process in self._processes.values():
            if process.poll() is None:
                process.kill()


def words(settings: WorkerSettings) -> list[str]:
    """What each rank is told, as flags: files of settings need not be where it runs."""
    told = []
    for field in settings.__struct_fields__:
        value, name = getattr(settings, field), field.removesuffix("_s")
        if name not in _TOLD or value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            told.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            told.append(f"--{flag}={value}")
    return told


def _module() -> list[str]:
    """What an interpreter is told to be a worker, as this process was."""
    return ["-P"] * ("-P" in sys.orig_argv) + ["-m", "worker"]


def _bare(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _OWN}


def _begin(command: Sequence[str], environ: Mapping[str, str], line: int) -> subprocess.Popen[bytes]:
    # In our own process group, which a supervisor ends with us.
    return subprocess.Popen(
        command,
        env={**environ, lifeline.VARIABLE: str(line)},
        stdin=subprocess.DEVNULL,
        pass_fds=(line,),
    )


def _begin_remote(
    rank: int, host: Host, command: Sequence[str], plan: Plan, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Its process is that of ssh."""
    from mlx._distributed_utils import launch

    told = [f"{name}={value}" for name, value in variables.items()]
    remote: Any = launch.RemoteProcess
    started = remote(rank, host.ssh, None, None, plan.files(), told, list(command))
    process: subprocess.Popen[bytes] = started.process
    assert process.stdout is not None
    assert process.stderr is not None
    for stream, is_noted in ((process.stdout, True), (process.stderr, False)):
        told_on = threading.Thread(target=_pass_on, args=(stream, is_noted), name=f"rank-{rank}", daemon=True)
        told_on.start()
    return process


def _pass_on(stream: IO[bytes], is_noted: bool) -> None:
    """What a remote rank logs. `is_noted`: the first line is upstream's note of its process id."""
    for number, line in enumerate(stream):
        if number or not is_noted:
            sys.stderr.buffer.write(line.replace(b"\r\n", b"\n"))
            sys.stderr.buffer.flush()
