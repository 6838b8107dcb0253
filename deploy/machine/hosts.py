"""Diagnosis of the machines in a hostfile: a report of each over ssh, and the problems in it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.machine.doctor import Finding, Verdict
from protocol.hosts import Backend, Host, Hosts, problem_with

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


class HostReport(msgspec.Struct, frozen=True):
    """Report of one machine. `model`: the given folder contains a model. `rdma`: RDMA tools are installed."""

    host: str
    versions: dict[str, str]
    model: bool
    rdma: bool


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """Result of asking one machine. `report`: its report; None if it failed, for the reason `why`."""

    host: Host
    report: HostReport | None
    why: str = ""


def ask(hosts: Hosts, model: str) -> list[HostAnswer]:
    """Ask each machine, one after another. `model`: a folder to check; empty: none."""
    return [_asked(host, model) for host in hosts.hosts]


def _asked(host: Host, model: str) -> HostAnswer:
    command = [host.python or sys.executable, "-c", _ASK, ",".join(PACKAGES), model]
    if not host.is_here:
        # No password prompt: there is none when a rank is started, either.
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host.ssh, shlex.join(command)]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return HostAnswer(host, None, f"no answer within {ANSWER_S_MAX:g} s")
    except OSError as error:
        return HostAnswer(host, None, str(error))
    try:
        return HostAnswer(host, msgspec.json.decode(ended.stdout, type=HostReport))
    except msgspec.MsgspecError:
        reason = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        return HostAnswer(host, None, reason)


def examine(path: Path, hosts: Hosts, backend: Backend, asked: Sequence[HostAnswer]) -> list[Finding]:
    """Return all findings, host by host. Pure."""
    if wrong := problem_with(hosts, backend):
        return [Finding(Verdict.WRONG, "hostfile", f"{path}: {wrong}", "`mlx.distributed_config` writes one")]
    findings = [Finding(Verdict.WELL, "hostfile", f"{len(hosts.hosts)} hosts, {backend}")]
    first = asked[0].report
    for rank, each in enumerate(asked):
        findings += _of_host(f"rank {rank}", each, first, backend)
    if backend == "ring" and any(not host.is_here for host in hosts.hosts):
        warning = "unencrypted TCP: data between the ranks can be read and changed in transit"
        findings.append(Finding(Verdict.NOTE, "ring", warning, "use a dedicated cable"))
    return findings


def _of_host(about: str, asked: HostAnswer, first: HostReport | None, backend: Backend) -> Iterator[Finding]:
    report, name = asked.report, asked.host.ssh
    if report is None:
        advice = f"ssh {name} must work without a password, and its `python` must be the interpreter there"
        yield Finding(Verdict.WRONG, about, f"{name}: {asked.why}", advice)
        return
    missing = [package for package, version in report.versions.items() if not version]
    other = [
        f"{package} {version}"
        for package, version in report.versions.items()
        if version and first is not None and version != first.versions.get(package)
    ]
    if missing:
        yield Finding(Verdict.WRONG, about, f"{name} has no {', '.join(missing)}", "install Roundhouse there")
    if other:
        advice = "install the same versions on all machines: ranks must compute every step alike"
        yield Finding(Verdict.WRONG, about, f"{name} has {', '.join(other)}", advice)
    if not report.model:
        advice = "each rank reads its own files: copy the model into the same folder there"
        yield Finding(Verdict.WRONG, about, f"{name} has no such model", advice)
    if backend == "jaccl" and not report.rdma:
        advice = "RDMA needs macOS 26.2, Thunderbolt 5, and `rdma_ctl enable` in macOS Recovery"
        yield Finding(Verdict.WRONG, about, f"{name} has no RDMA", advice)
    if not missing and not other and report.model and (report.rdma or backend != "jaccl"):
        yield Finding(Verdict.WELL, about, f"{name}, host name {report.host}")
