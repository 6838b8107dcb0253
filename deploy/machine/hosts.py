"""The machines of a hostfile: what each says of itself when it is asked, and what is wrong with that."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.machine.doctor import Finding, Verdict
from protocol.hosts import Backend, Host, Hosts, wrong_with

ANSWER_S_MAX = 20.0
PACKAGES = ("mlx-roundhouse", "mlx", "mlx-lm")
_ASK = """
import importlib.metadata as m, json, os, platform, shutil, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
print(json.dumps({
    "host": platform.node(),
    "versions": {name: version(name) for name in sys.argv[1].split(",")},
    "model": not sys.argv[2] or os.path.isfile(os.path.join(os.path.expanduser(sys.argv[2]), "config.json")),
    "rdma": shutil.which("ibv_devices") is not None,
}))
"""


class Told(msgspec.Struct, frozen=True):
    """By one machine. `model`: the folder that was asked for has one; `rdma`: there are commands for it."""

    host: str
    versions: dict[str, str]
    model: bool
    rdma: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """`told`: None where nothing came, and then `why`."""

    host: Host
    told: Told | None
    why: str = ""


def ask(hosts: Hosts, model: str) -> list[Asked]:
    """Each of them, one after another. `model`: a folder; empty: none is looked for."""
    return [_asked(host, model) for host in hosts.hosts]


def _asked(host: Host, model: str) -> Asked:
    command = [host.python or sys.executable, "-c", _ASK, ",".join(PACKAGES), model]
    if not host.is_here:
        # No question for a password: nobody would answer it when a rank is started, either.
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host.ssh, shlex.join(command)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        return Asked(host, None, f"no answer within {ANSWER_S_MAX:g} s")
    except OSError as error:
        return Asked(host, None, str(error))
    try:
        return Asked(host, msgspec.json.decode(ended.stdout, type=Told))
    except msgspec.MsgspecError:
        said = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        return Asked(host, None, said)


def examine(path: Path, hosts: Hosts, backend: Backend, asked: Sequence[Asked]) -> list[Finding]:
    """All there is to say, host by host. Pure."""
    if wrong := wrong_with(hosts, backend):
        return [Finding(Verdict.WRONG, "hostfile", f"{path}: {wrong}", "`mlx.distributed_config` writes one")]
    findings = [Finding(Verdict.WELL, "hostfile", f"{len(hosts.hosts)} hosts, {backend}")]
    first = asked[0].told
    for rank, each in enumerate(asked):
        findings += _of_host(f"rank {rank}", each, first, backend)
    if backend == "ring" and any(not host.is_here for host in hosts.hosts):
        told = "plain TCP, without a key: what passes between the ranks can be read and changed on its way"
        findings.append(Finding(Verdict.NOTE, "ring", told, "let it run over a cable of its own"))
    return findings


def _of_host(about: str, asked: Asked, first: Told | None, backend: Backend) -> Iterator[Finding]:
    told, name = asked.told, asked.host.ssh
    if told is None:
        advice = f"ssh {name} must work without a password, and the interpreter be there: say `python` of it"
        yield Finding(Verdict.WRONG, about, f"{name}: {asked.why}", advice)
        return
    missing = [package for package, version in told.versions.items() if not version]
    other = [
        f"{package} {version}"
        for package, version in told.versions.items()
        if version and first is not None and version != first.versions.get(package)
    ]
    if missing:
        yield Finding(Verdict.WRONG, about, f"{name} has no {', '.join(missing)}", "install Roundhouse there")
    if other:
        advice = "the same versions on all: they must take every step alike"
        yield Finding(Verdict.WRONG, about, f"{name} has {', '.join(other)}", advice)
    if not told.model:
        advice = "each rank reads its own files: put the model into the same folder there"
        yield Finding(Verdict.WRONG, about, f"{name} has no such model", advice)
    if backend == "jaccl" and not told.rdma:
        advice = "macOS 26.2, Thunderbolt 5, and `rdma_ctl enable` in macOS Recovery"
        yield Finding(Verdict.WRONG, about, f"{name} has no RDMA", advice)
    if not missing and not other and told.model and (told.rdma or backend != "jaccl"):
        yield Finding(Verdict.WELL, about, f"{name}, which calls itself {told.host}")
