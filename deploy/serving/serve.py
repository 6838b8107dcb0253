"""Settings and children of `roundhouse serve`, from flags, variables and the TOML file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv6Address

from msgspec import Struct
from msgspec.structs import replace

from deploy.serving import models
from deploy.serving.commandlines import child_commands, worker_flags
from deploy.serving.models import with_experts_memory, with_fallback, wrong_hosts
from deploy.serving.settings import ABOUT, GATEWAY, PROGRAM, ServeSettings, default_keys_file, table
from deploy.supervisor.child import Child, ServedModel
from protocol import sockets
from protocol.common.state_folder import server_name
from protocol.settings import reader as settings
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import SettingsError
from protocol.settings.worker import WorkerSettings

_HOST = re.compile(r"(\w[\w.-]*)?")
"""A name or an IPv4 address; empty: all addresses."""


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ServeSettings, list[Child]]:
    """Return settings and children, the gateway first. Raises `SettingsError` or `EndpointError`.

    All errors are reported together: those of `serve` and those of each worker, even one that starts later.
    The gateway validates its own section: it starts at once, and everything stops if it exits.
    """
    errors: list[str] = []
    given = config = None
    with _collected(errors):
        config = settings.config_file(argv, environ)
        given = own_settings(argv, environ)
    named = (given.model if given else ()) or _model_of_worker(config)
    served = models.read(named, config, errors, replicas=given.replicas if given else 1)
    if len(served) == 1 and not served[0].named:
        served = [_named_by_worker(served[0], config, environ)]
    if given is not None:
        served = [with_experts_memory(model, given) for model in served]
    if given is not None and len(served) == 1:
        served = [with_fallback(served[0], given)]
    if given is not None:
        with _collected(errors):
            given = _with_budget(given, served)
    errors += _refused_by_workers(given or ServeSettings(), served, config, environ)
    if given is not None:
        errors += wrong_hosts(given, served)
    errors += settings.unknown_keys(WorkerSettings, "worker", table("worker", config), config or "")
    if errors or given is None:
        raise SettingsError("\n".join(dict.fromkeys(errors)))
    endpoint = given.endpoint or _endpoint_of_gateway(given, config)
    return given, child_commands(given, served, endpoint, config, environ)


def models_of(children: Sequence[Child]) -> list[ServedModel]:
    """Return the models of the workers, each once."""
    return list({child.model.name: child.model for child in children if child.model is not None}.values())


def address(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port for clients of a `serve` with these settings. Raises `SettingsError`."""
    return _address(own_settings(argv, environ), settings.config_file(argv, environ))


def own_settings(argv: Sequence[str], environ: Mapping[str, str]) -> ServeSettings:
    """Return the settings of `serve` itself. Raises `SettingsError`."""
    others: dict[str, type[Struct]] = {"gateway": GatewaySettings, "worker": WorkerSettings}
    given = settings.read(
        ServeSettings, "serve", argv, environ, program=PROGRAM, about=ABOUT, elsewhere=others
    )
    return _with_default_keys(given, settings.config_file(argv, environ), environ)


def _with_default_keys(given: ServeSettings, config: str | None, environ: Mapping[str, str]) -> ServeSettings:
    """Return the settings with the keys of `roundhouse keys create`, if no setting says anything of keys."""
    named = ("api_keys", "api_keys_file", "insecure_no_keys")
    if any(getattr(given, name) for name in named) or table("gateway", config).keys() & set(named):
        return given
    default = default_keys_file(environ)
    return replace(given, api_keys_file=default) if default is not None and default.is_file() else given


def _with_budget(given: ServeSettings, served: Sequence[ServedModel]) -> ServeSettings:
    """Return the settings with the models' memory budget, less the spare's share. Raises `SettingsError`."""
    budget = models.memory_budget(given.memory_budget, served)
    if budget is None or not given.spare:
        return replace(given, memory_budget=budget)
    left = models.beside_spare(budget, served)
    return replace(given, memory_budget=budget if left is None else left, spare=0 if left is None else 1)


@contextlib.contextmanager
def _collected(errors: list[str]) -> Iterator[None]:
    """Collect settings errors instead of raising them."""
    try:
        yield
    except SettingsError as error:
        errors += str(error).splitlines()


def _refused_by_workers(
    given: ServeSettings, served: Sequence[ServedModel], config: str | None, environ: Mapping[str, str]
) -> list[str]:
    """Return the errors that each worker would report in its flags, its section and its variables."""
    errors: list[str] = []
    for model in served:
        flags = worker_flags(given, model)
        argv = [f"--config={config}", *flags] if config else flags
        with _collected(errors):
            settings.read(WorkerSettings, "worker", argv, environ, program=PROGRAM, about="")
    return errors


def _model_of_worker(config: str | None) -> tuple[str, ...]:
    found = table("worker", config).get("model")
    return (found,) if isinstance(found, str) else ()


def _named_by_worker(model: ServedModel, config: str | None, environ: Mapping[str, str]) -> ServedModel:
    """Return a model with the name that variables or the file give its worker, if any."""
    own = environ.get("ROUNDHOUSE_SERVED_NAME") or table("worker", config).get("served_name")
    return replace(model, name=own, named=True) if isinstance(own, str) and own else model


def _endpoint_of_gateway(given: ServeSettings, config: str | None) -> str:
    """Return the endpoint that the gateway binds by default; its own section counts, as for the gateway."""
    endpoint = table("gateway", config).get("endpoint")
    if isinstance(endpoint, str) and endpoint:
        return endpoint
    return sockets.default_endpoint(server_name(*_address(given, config)))


def _address(given: ServeSettings, config: str | None) -> tuple[str, int]:
    own = table("gateway", config)
    host = own.get("host") if given.host is None else given.host
    port = own.get("port") if given.port is None else given.port
    # The gateway refuses values of other types.
    host = host if isinstance(host, str) else GATEWAY.host
    if not _HOST.fullmatch(host) and not _is_ipv6(host):
        raise SettingsError(f"host: {host!r} is neither an IP address nor the name of a host")
    return host, port if isinstance(port, int) else GATEWAY.port


def _is_ipv6(host: str) -> bool:
    try:
        return bool(IPv6Address(host))
    except ValueError:
        return False
