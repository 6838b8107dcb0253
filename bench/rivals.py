"""Our server and other servers, each started as its users start it, on one model folder and with one BLAS.

Upstream's two are installed in our own environment. The others need other versions of upstream, and each has
an environment of its own, created when it is first named. The path of another checkout of this project names
its server, which runs in our environment, so that two commits can be compared.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench.processes import running, wait_for
from tests.conformance.drivers import Environment
from tests.conformance.environments import make
from tests.ports import free_port
from worker.process.preload import find_openblas

NAMES = ("roundhouse", "mlx_lm.server", "mlx_vlm.server")
_HEAVY = ("torch", "torchvision")
"""Excluded: 3 GB of CUDA on Linux, and nothing that answers a request imports them."""
FOREIGN = {
    name: Environment(name, "python", (f"{name}=={version}", "mlx[cpu]"), without=_HEAVY)
    for name, version in (("vllm-mlx", "0.6.0"), ("rapid-mlx", "0.16.10"))
}
INSTALLED = Path(".venv") / "rivals"


class NotServing(Exception):
    """A server does not start; the message ends with the last line of its log."""


@dataclass(frozen=True)
class Server:
    """A running server. `fields`: what a chat request to it contains besides the usual."""

    name: str
    url: str
    process: psutil.Process
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True)
class Start:
    """How to start a server. `own`: a folder that exists as long as the server; `flags`: further flags."""

    folder: Path
    port: int
    rows_max: int
    reuse: bool
    own: Path
    flags: Sequence[str] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.own / "log"


@dataclass(frozen=True)
class Command:
    """`python -m module …`. `ready`: the path that answers 200 once the server is ready."""

    module: str
    arguments: Sequence[str]
    environ: dict[str, str]
    fields: dict[str, Any]
    ready: str = "/health"
    python: str = sys.executable


@contextlib.contextmanager
def servers(
    folder: Path, rows_max: int, names: Sequence[str] = NAMES, *, reuse: bool = False
) -> Iterator[list[Server]]:
    """Run the named servers, all at once. Their data on disk is deleted at the end.

    `reuse`: switch on prefix caches that are off by default. Raises `NotServing`.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server(name, folder, rows_max, reuse=reuse)) for name in names]


@contextlib.contextmanager
def server(
    name: str, folder: Path, rows_max: int, *, reuse: bool = False, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """Run one server with further `flags`.

    Raises `NotServing`, or `tests.conformance.environments.NotMade` if its environment cannot be created.
    """
    with (
        prepared(name, folder, rows_max, reuse=reuse, flags=flags) as (start, command),
        started(command, start.log) as process,
    ):
        try:
            wait_for(start.url + command.ready, process)
        except (ChildProcessError, TimeoutError) as error:
            raise NotServing(f"{error}: {_last_line(start.log)}") from error
        yield Server(name, start.url, process, command.fields)


@contextlib.contextmanager
def prepared(
    name: str, folder: Path, rows_max: int, *, reuse: bool = False, flags: Sequence[str] = ()
) -> Iterator[tuple[Start, Command]]:
    """Yield how a server starts, with a folder of its own that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="rh-") as own:
        start = Start(folder, free_port(), rows_max, reuse, Path(own), flags)
        yield start, command_of(name, start)


def started(command: Command, log: Path) -> contextlib.AbstractContextManager[psutil.Process]:
    """Start the process without waiting until it is ready."""
    return running(command.module, command.arguments, command.environ, log=log, python=command.python)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace", encoding="utf-8").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def command_of(name: str, start: Start) -> Command:
    """Return the command that starts the server `name`. Raises `ValueError` for an unknown name."""
    if is_checkout(name):
        return replace(_ours(start), environ=checkout_environ(Path(name)))
    if name not in _COMMANDS:
        raise ValueError(f"no server is called {name!r}; known: {', '.join(_COMMANDS)}")
    return _COMMANDS[name](start)


def is_checkout(name: str) -> bool:
    """Return whether `name` is the path of a checkout of this project."""
    return (Path(name) / "deploy" / "__main__.py").is_file()


def checkout_environ(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports our packages from `checkout`, wherever it is started."""
    return {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}


def _ours(start: Start) -> Command:
    flags = ["--endpoint", f"ipc://{start.own}/line", "--max-running", str(start.rows_max)]
    # A new folder each time: every run sends the same prompts and must not find those of the last run.
    flags += ["--log-level", "warning", "--prefix-cache-dir", str(start.own / "prefixes")]
    return Command("deploy", ["serve", *_where(start), *flags], {}, {"ignore_eos": True}, "/ready")


def _mlx_lm(start: Start) -> Command:
    rows = ["--decode-concurrency", str(start.rows_max)]
    return Command("mlx_lm.server", [*_where(start), *rows], _blas(), {})


def _mlx_vlm(start: Start) -> Command:
    flags = ["--host", "127.0.0.1", "--max-num-seqs", str(start.rows_max)]
    cache = {"APC_ENABLED": "1", "APC_DISK_PATH": str(start.own / "prefixes")} if start.reuse else {}
    fields = {"model": str(start.folder)}
    return Command("mlx_vlm.server", [*_where(start), *flags], _blas() | cache, fields)


def _vllm_mlx(start: Start) -> Command:
    flags = ["--port", str(start.port), "--host", "127.0.0.1", "--max-num-seqs", str(start.rows_max)]
    return _foreign("vllm-mlx", "vllm_mlx.cli", start, [*flags, "--continuous-batching"])


def _rapid_mlx(start: Start) -> Command:
    flags = ["--port", str(start.port), "--host", "127.0.0.1", "--max-num-seqs", str(start.rows_max)]
    reuse = ["--hybrid-cache-entries", "8"] if start.reuse else []
    return _foreign("rapid-mlx", "rapid_mlx.cli", start, [*flags, *reuse])


def _foreign(name: str, module: str, start: Start, flags: Sequence[str]) -> Command:
    python = make(FOREIGN[name], INSTALLED) / "bin" / "python"
    # Their prefix caches are below HOME, and nothing may be fetched from the network.
    environ = _blas() | {"HOME": str(start.own), "HF_HUB_OFFLINE": "1"}
    fields = {"model": str(start.folder)}
    return Command(module, ["serve", str(start.folder), *flags], environ, fields, python=str(python))


def _where(start: Start) -> list[str]:
    return ["--model", str(start.folder), "--port", str(start.port), *start.flags]


_COMMANDS: dict[str, Callable[[Start], Command]] = {
    "roundhouse": _ours,
    "mlx_lm.server": _mlx_lm,
    "mlx_vlm.server": _mlx_vlm,
    "vllm-mlx": _vllm_mlx,
    "rapid-mlx": _rapid_mlx,
}
KNOWN = tuple(_COMMANDS)


def _blas() -> dict[str, str]:
    """Return the environment for float32 products by OpenBLAS if it is installed, as our worker does for
    itself."""
    library = find_openblas()
    return {"LD_PRELOAD": str(library)} if library else {}
