"""Launcher of the followers: as child processes on this machine, and over ssh on others.

Each follower gets the set's keys on stdin (`rank_info`).
ssh uses upstream's private `RemoteProcess`, as `mlx.launch` does; a test checks that it still exists. No
follower outlives the leader: children share its process group and have a lifeline, a remote process loses its
terminal when ssh ends, and all end when their connection to the leader does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from protocol import breadcrumbs, channel, lifeline
from protocol.hosts import Backend, Host, Hosts
from protocol.settings.worker import WorkerSettings
from protocol.sockets import Curve
from worker.process.preload import GUARD
from worker.ranks import rank_info

log = logging.getLogger(__name__)

_TOLD = (
    "model",
    "served_name",
    "task",
    "text_only",
    "kv_bits",
    "kv_group_size",
    "memory_limit_bytes",
    "memory_budget",
    "memory_headroom",
    "split",
    "join_timeout",
    "log_format",
    "log_level",
)
"""Settings that the leader passes to all ranks."""
_SPINNING = "MLX_METAL_FAST_SYNCH"
"""Set by upstream's hostfiles, but removed here: spinning on the GPU uses a whole core while idle."""
_OWN = (
    lifeline.VARIABLE,
    channel.SPAWN_FD,
    channel.SPARE,
    breadcrumbs.VARIABLE,
    GUARD,
    "ROUNDHOUSE_CONFIG",
)
"""Environment variables of the leader that followers do not inherit."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The ranks to start and their addresses. `port`: the backend's first port."""

    hosts: Hosts
    backend: Backend
    port: int

    def files(self) -> dict[str, str]:
        """Return the contents of files, by the environment variable that refers to each."""
        if self.backend == "ring":
            return {rank_info.RING: json.dumps(self.hosts.ring(self.port))}
        return {rank_info.DEVICES: json.dumps(self.hosts.devices())}

    def variables(self, endpoint: str) -> dict[str, str]:
        """Return the other environment variables. `endpoint`: the leader's RPC endpoint."""
        told = dict(each.partition("=")[::2] for each in self.hosts.envs)
        told.pop(_SPINNING, None)
        if self.backend == "jaccl":
            told[rank_info.COORDINATOR] = f"{self.hosts.hosts[0].ips[0]}:{self.port}"
        return told | {rank_info.LINE: endpoint, rank_info.KEYS: "stdin"}


@dataclass(frozen=True, slots=True)
class LeaderEndpoint:
    """The leader's RPC endpoint, as followers need it. `folder`: for files of followers on this machine.
    `keys`: those of a follower."""

    endpoint: str
    folder: Path
    keys: Curve


class RankProcesses:
    """Processes of the followers."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[Host, subprocess.Popen[bytes]]] = {}
        self._lifeline: int | None = None

    def start(
        self,
        plan: LaunchPlan,
        line: LeaderEndpoint,
        settings: WorkerSettings,
        environ: MutableMapping[str, str],
    ) -> None:
        """Start all followers, and set this process's own rank in `environ`. Raises `OSError`."""
        variables = plan.variables(line.endpoint)
        files = {}
        for name, content in plan.files().items():
            files[name] = str(line.folder / name)
            Path(files[name]).write_text(content, encoding="utf-8")
        keys = rank_info.encode_keys(line.keys)
        reader, self._lifeline = os.pipe()
        try:
            for rank, host in enumerate(plan.hosts.hosts[1:], start=1):
                command = [host.python or sys.executable, *_module(), *words(settings)]
                if host.is_here:
                    told = {
                        **_bare(environ),
                        **variables,
                        **files,
                        rank_info.RANK: str(rank),
                        rank_info.FIRST: str(os.getpid()),
                    }
                    self._processes[rank] = host, _begin(command, told, reader, keys)
                else:
                    process = _begin_remote(rank, host, command, plan, variables, keys)
                    self._processes[rank] = host, process
        finally:
            os.close(reader)
        environ.update(variables | files | {rank_info.RANK: "0"})

    def ended(self) -> str | None:
        """Return a description of the first follower that has ended, or None."""
        for rank, (host, process) in self._processes.items():
            if (status := process.poll()) is not None:
                return f"rank {rank} on {host.ssh} exited with status {status}"
        return None

    def name(self, rank: int) -> str:
        found = self._processes.get(rank)
        return f"rank {rank} on {found[0].ssh}" if found else f"rank {rank}"

    def kill(self) -> None:
        """Kill all followers, including stopped ones."""
        for _, process in self._processes.values():
            if process.poll() is None:
                process.kill()


def words(settings: WorkerSettings) -> list[str]:
    """Return the settings of a follower as flags: settings files may not exist on its machine."""
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
    """Return the interpreter's arguments that start a worker, as for this process."""
    utf8 = ["-X", "utf8"] if sys.flags.utf8_mode else []
    return [*utf8, *["-P"] * ("-P" in sys.orig_argv), "-m", "worker"]


def _bare(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _OWN}


def _begin(
    command: Sequence[str], environ: Mapping[str, str], line: int, keys: bytes
) -> subprocess.Popen[bytes]:
    # In our process group, which the supervisor ends together with us.
    process = subprocess.Popen(
        command,
        env={**environ, lifeline.VARIABLE: str(line)},
        stdin=subprocess.PIPE,
        pass_fds=(line,),
    )
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed
        stdin.write(keys)
    return process


def _begin_remote(
    rank: int,
    host: Host,
    command: Sequence[str],
    plan: LaunchPlan,
    variables: Mapping[str, str],
    keys: bytes,
) -> subprocess.Popen[bytes]:
    """Start a remote rank; return the process of ssh."""
    from mlx._distributed_utils import launch

    told = [f"{name}={value}" for name, value in variables.items()]
    remote: Any = launch.RemoteProcess
    started = remote(rank, host.ssh, None, None, plan.files(), told, list(command))
    process: subprocess.Popen[bytes] = started.process
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = (process.stdout, (process.stdin, keys)), (process.stderr, None)
    for output in outputs:
        told_on = threading.Thread(target=_pass_on, args=output, name=f"rank-{rank}", daemon=True)
        told_on.start()
    return process


def _pass_on(stream: IO[bytes], answer: tuple[IO[bytes], bytes] | None) -> None:
    """Copy a remote rank's output to stderr. `answer`: skip the first line, upstream's process id, and then
    write to its input; before that line, the remote terminal would echo what it reads."""
    for number, line in enumerate(stream):
        if answer is not None and not number:
            stdin, keys = answer
            with contextlib.suppress(BrokenPipeError):
                stdin.write(keys)
                stdin.flush()
            continue
        sys.stderr.buffer.write(line.replace(b"\r\n", b"\n"))
        sys.stderr.buffer.flush()
