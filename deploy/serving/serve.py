"""What `roundhouse serve` runs: its settings, and from them the gateway's and the workers' command lines.

Whatever `serve` is told by a flag, a variable or `[serve]` it hands on as a flag, so it wins over `[gateway]`
and `[worker]`. What it is not told, the children find for themselves, in the same file and environment.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from deploy.serving import models
from deploy.supervisor.child import Child
from deploy.supervisor.memory import fits_beside
from deploy.supervisor.models import ServedModel
from deploy.supervisor.reloading import Reloading
from deploy.supervisor.restarts import RestartLimits
from deploy.supervisor.supervisor import STOP_TIMEOUT_S
from protocol import logs, settings, sockets
from protocol.sizes import Size

PROGRAM = "roundhouse serve"
ABOUT = """Run the gateway and a worker for each model in the foreground, start again what dies, and stop all
on Ctrl-C. Of several models those run that are asked for; what else there is to say of one stands in the
file, under [models.NAME]: model, aliases, resident, and what can be set for a worker.
Every setting is also a variable (--max-running is ROUNDHOUSE_MAX_RUNNING) and a key under [serve] in the
file named by --config (max_running); a flag wins over a variable, a variable over the file."""

PORT = 8000
DRAIN_TIMEOUT_S = 10.0
"""The worker's own default."""
API_KEYS = "ROUNDHOUSE_API_KEYS"
GATEWAY_FLAGS = (
    "host",
    "port",
    "api_keys_file",
    "insecure_no_keys",
    "max_per_key",
    "cors_origins",
    "curve_keys",
    "max_waiting",
    "max_waiting_tokens",
    "queue_timeout_s",
    "max_connections",
    "failover_timeout_s",
    "load_timeout_s",
    "unload_after_s",
    "log_format",
    "log_level",
)
WORKER_FLAGS = (
    "max_running",
    "prefix_cache_ram",
    "prefix_cache_disk",
    "prefix_cache_dir",
    "drain_timeout_s",
    "curve_keys",
    "log_format",
    "log_level",
)

_HOME = Path(__file__).resolve().parents[2]


class ServeSettings(Struct, frozen=True, kw_only=True, rename=settings.public_name):
    """What can be said once for the supervisor and its children. None: each child's own default."""

    model: Annotated[
        tuple[str, ...],
        Meta(
            description="model id or folder, or NAME=… to have it called so; of several each is started when"
            " it is asked for; none: the embedded pocket model, no download"
        ),
    ] = ()
    host: Annotated[str | None, Meta(description="address to listen on (default: 127.0.0.1)")] = None
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description=f"port where clients connect (default: {PORT})"),
    ] = None
    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="keys that clients must offer; ps shows a flag: better a file, or the variable"),
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Meta(description="file with one key on each line, then a name; read again when it changes"),
    ] = None
    insecure_no_keys: Annotated[
        bool | None, Meta(description="listen beyond this machine although there are no API keys")
    ] = None
    max_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that one API key may have in the house; beyond them 429 at once"),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="web pages that may ask from a browser, as https://host; * for all")
    ] = ()
    curve_keys: Annotated[
        Path | None, Meta(description="folder with CURVE keys, for a tcp:// endpoint off loopback")
    ] = None
    max_running: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="requests that run at once on the worker")
    ] = None
    max_waiting: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="requests that may wait for the worker; beyond them 503 at once"),
    ] = None
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="tokens that prompts which wait may have together; beyond them 503 at once"
            " (default: four times what the worker's memory holds)"
        ),
    ] = None
    queue_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds after which a request that was not begun gets a 503 (default: it waits)"),
    ] = None
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(description="connections of clients; beyond them 503 at once (default: 1024)"),
    ] = None
    failover_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds that requests which lost their worker wait for it (default: 120)"),
    ] = None
    load_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="seconds that requests wait for a model that is started for them (default: 300)"),
    ] = None
    unload_after_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(
            description="seconds without a request after which one of several models is unloaded (default: it"
            " stays until its room is needed)"
        ),
    ] = None
    memory_budget: Annotated[
        Size | None,
        Meta(description="memory for all models together (default: for one what it needs, for several 70%)"),
    ] = None
    prefix_cache_ram: Annotated[
        Size | None,
        Meta(description="memory for prefixes, to be reused (default: a part of what is left; 0: no reuse)"),
    ] = None
    prefix_cache_disk: Annotated[
        Size | None, Meta(description="disk for prefixes that outlive the worker (default: 4GiB; 0: none)")
    ] = None
    prefix_cache_dir: Annotated[
        Path | None, Meta(description="their folder (default: in the user's cache folder)")
    ] = None
    endpoint: Annotated[
        str | None,
        Meta(description="where gateway and worker meet, ipc:// or tcp:// (default: a socket named by port)"),
    ] = None
    log_format: Annotated[logs.Format | None, Meta(description="text or json (default: text)")] = None
    log_level: Annotated[
        logs.Level | None, Meta(description="debug, info, warning or error (default: info)")
    ] = None
    drain_timeout_s: Annotated[
        Annotated[float, Meta(ge=0, le=86400)] | None,
        Meta(
            description="seconds that a worker's requests get to end when it is told to stop; then another"
            " one goes on with them (default: 10)"
        ),
    ] = None
    ready_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds a reloaded worker gets to become ready")
    ] = 600.0
    stop_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds each child gets to stop before it is killed")
    ] = STOP_TIMEOUT_S
    deaths_max: Annotated[
        int, Meta(ge=0, description="give up when more processes than this died within five minutes")
    ] = RestartLimits().deaths_max
    restart_delay_max_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="longest wait before a process that keeps dying is started again"),
    ] = RestartLimits().delay_s_max

    def reloading(self, control: Path) -> Reloading:
        """How the worker is reloaded, by orders that come to the socket `control`."""
        drain_s = DRAIN_TIMEOUT_S if self.drain_timeout_s is None else self.drain_timeout_s
        return Reloading(control, drain_s, self.ready_timeout_s, fits_beside)

    def restart_limits(self) -> RestartLimits:
        return RestartLimits(deaths_max=self.deaths_max, delay_s_max=self.restart_delay_max_s)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, list[Child]]:
    """Settings and children, the gateway first. Raises `SettingsError` or `EndpointError`."""
    given, config = _given(argv, environ)
    endpoint = given.endpoint or _endpoint_of_gateway(given.port, config)
    served = models.read(given.model or _model_of_worker(config), config)
    given = replace(given, memory_budget=models.memory_budget(given.memory_budget, served))
    return given, child_commands(given, served, endpoint, config, environ)


def port(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Where clients connect to a `serve` that is told this. Raises `SettingsError`."""
    given, config = _given(argv, environ)
    return _port_of_gateway(given.port, config)


def _given(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, str | None]:
    given = settings.read(ServeSettings, "serve", argv, environ, program=PROGRAM, about=ABOUT)
    return given, config_file(argv, environ)


def child_commands(
    given: ServeSettings,
    served: Sequence[ServedModel],
    endpoint: str,
    config: str | None,
    environ: Mapping[str, str],
) -> list[Child]:
    """Gateway, then workers: stopped in this order, nothing new comes in while the last requests end."""

    def command(module: str, own: Sequence[str], flags: Sequence[str]) -> list[str]:
        argv = [*python_module(module), *_flag("config", config), *_flag("endpoint", endpoint), *own]
        for flag in flags:
            argv += _flag(settings.public_name(flag), getattr(given, flag))
        return argv

    # API keys travel in the environment: everybody can see a command line. They are no business of workers.
    bare = {name: value for name, value in environ.items() if name != API_KEYS}
    keys = {API_KEYS: ",".join(given.api_keys)} if given.api_keys else {}
    children = [Child("gateway", command("broker", (), GATEWAY_FLAGS), bare | keys, hears=True)]
    for model in served:
        several = len(served) > 1
        argv = command("worker", _model_flags(model, several), WORKER_FLAGS)
        argv += _flag("memory_budget", given.memory_budget)
        for name, value in model.settings.items():
            argv += _flag(name, value)
        child = f"worker[{model.name}]" if several else "worker"
        children.append(Child(child, argv, dict(bare), model=model))
    return children


def _model_flags(model: ServedModel, several: bool) -> list[str]:
    """One that nobody has named finds out by itself what it is and what it is called."""
    if several or model.named:
        return [*_flag("model", model.model or ""), *_flag("served_name", model.name)]
    return _flag("model", model.model)


def _model_of_worker(config: str | None) -> tuple[str, ...]:
    found = _table("worker", config).get("model")
    return (found,) if isinstance(found, str) else ()


def python_module(module: str) -> list[str]:
    """The command line of one of our packages, from the tree that this one was imported from.

    `-m` would look into the current folder first: somebody's own `worker.py` must not become our worker. Only
    a checkout that we run from is such a folder by right.
    """
    trusted = Path.cwd() == _HOME
    return [sys.executable, *([] if trusted else ["-P"]), "-m", module]


def config_file(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The TOML file that `settings.read` takes, to be handed on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found: str | None = parser.parse_known_args(list(argv))[0].config
    return found or environ.get("ROUNDHOUSE_CONFIG") or None


def gateway_table(config: str | None) -> dict[str, object]:
    """The gateway's own section of the file, unchecked."""
    return _table("gateway", config)


def _table(section: str, config: str | None) -> dict[str, object]:
    table = tomllib.loads(Path(config).read_text()).get(section) if config else None
    return table if isinstance(table, dict) else {}


def _endpoint_of_gateway(port: int | None, config: str | None) -> str:
    """Where the gateway would bind by itself: its own section counts, or the two would not meet."""
    endpoint = gateway_table(config).get("endpoint")
    if isinstance(endpoint, str) and endpoint:
        return endpoint
    return sockets.default_endpoint(_port_of_gateway(port, config))


def _port_of_gateway(port: int | None, config: str | None) -> int:
    if port is not None:
        return port
    # A port of another type is for the gateway to refuse.
    return found if isinstance(found := gateway_table(config).get("port"), int) else PORT


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    match value:
        case None | ():
            return []
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case tuple():
            value = ",".join(value)
    # One word with "=": a value that begins with a dash stays a value.
    return [f"--{flag}={value}"]
