"""Protection against web pages of other origins: the Host, the Origin and the content type of requests.

A browser lets any page send requests to this machine, and DNS rebinding lets it read the answers: a name of
the attacker's resolves to his server first and to 127.0.0.1 afterwards, so that to the browser both are one
origin. Neither works with API keys, which such a page does not have. Without them:

* Host must name this server. A rebound name never does. An IP address always does, because a browser sends
  it only if no name was resolved.
* A page of another origin is refused, unless CORS is configured for it.

Administrative routes are refused to pages of other origins in either case, unless CORS is configured and keys
are required. Other clients send no Origin, and could forge one: they need a key, or access to loopback.

Browsers send Origin with every POST and with every request whose answer a page could read, and Sec-Fetch-Site
with the remaining ones, as far as they go to loopback or to https.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.datastructures import Headers as StarletteHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from broker.dialects.host_patterns import Address, HostPatterns, canonical_host
from broker.middleware.auth import PROBES
from broker.middleware.errors import error_response, log_refusal
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values."""
Fields = dict[str, list[str]]
"""Values of the headers that are read, by name. Other bytes than ASCII are escaped."""

CONTAINER_HOSTS = ("host.docker.internal", "host.containers.internal")
"""Names of this machine in containers. No one else can own them: `.internal` is not a public domain."""

ADMINISTRATIVE_PATHS = (
    "/v1/adapters",
    "/v1/batches",
    "/v1/cache",
    "/v1/files",
    "/v1/inspect",
    "/v1/load_lora_adapter",
    "/v1/messages/batches",
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/models/pin",
    "/v1/models/unpin",
    "/v1/models/pull",
    "/v1/requests",
    "/v1/status",
    "/v1/unload_lora_adapter",
    "/metrics",
)
"""Paths, with those below them, that change what all clients share, or reveal what others do."""

DEFAULT_PORTS = {"http": 80, "https": 443}
JSON = "application/json"

_FIELDS = frozenset(
    (
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
    )
)
_AUTHORITY = re.compile(r"(?:\[([^]]*)\]|([^:\[\]]+))(?::([0-9]{0,5}))?")
_QUOTED_CHARACTERS_MAX = 100


class Authority(NamedTuple):
    """Host and port of a Host or Origin header; `host` and `address` as from `canonical_host`."""

    host: str
    address: Address | None
    port: int | None


def read_authority(text: str) -> Authority:
    """Parse `host[:port]`. Raises ValueError, also for user information before the host."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError("not a host with a port")
    literal, name, port = found.groups()
    host, address = canonical_host(name if literal is None else literal, is_literal=literal is not None)
    return Authority(host, address, int(port) if port else None)


def names_of(listening: str, nodename: str) -> frozenset[str]:
    """Return the names of this machine. `listening`: the host to listen on; `nodename`: its own host name."""
    first = nodename.partition(".")[0]
    names = set()
    for name in ("localhost", *CONTAINER_HOSTS, listening, nodename, first, f"{first}.local"):
        try:
            names.add(canonical_host(name)[0])
        except ValueError:  # an IPv6 address, or a host name that no URL can contain
            continue
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class OriginPolicy:
    """Decision whether a request may come from where its headers say.

    `names`: names of this machine. `allowed_hosts`: further names of the server. `cors_origins`: origins that
    CORS is configured for. `needs_key`: whether requests need an API key, which is checked elsewhere.
    """

    names: frozenset[str]
    allowed_hosts: HostPatterns | None
    cors_origins: frozenset[str]
    needs_key: bool

    def check(self, method: str, path: str, http_version: str, headers: Headers) -> None:
        """Raise `RequestError` for a request that is refused."""
        fields = _read_fields(headers)
        host = _host_of(fields, http_version)
        if host is not None and not self._is_served(host):
            raise RequestError(
                Code.HOST_NOT_ALLOWED,
                f"This server does not answer as `{host.host}`. If that is its name, start it with "
                f"`--allowed-hosts {host.host}`.",
            )
        origins = [origin for origin in fields["origin"] if not _is_same(origin, host)]
        if origins or _is_foreign_resource(method, fields):
            self._check_foreign(origins, path)
        if method == "POST":
            _check_content_type(fields)

    def _is_served(self, host: Authority) -> bool:
        if self.needs_key and self.allowed_hosts is None:
            return True
        if host.address is not None or host.host in self.names:
            return True
        return self.allowed_hosts is not None and self.allowed_hosts.allows(host.host, None)

    def _check_foreign(self, origins: Sequence[str], path: str) -> None:
        """Check a request from a page of another origin. `origins`: empty if the browser does not tell."""
        known = bool(origins) and all(map(self._is_configured, origins))
        administrative = is_administrative(path)
        if known and administrative and not self.needs_key:
            raise RequestError(
                Code.ORIGIN_NOT_ALLOWED,
                "Pages of other origins may use administrative routes only if the server requires API keys.",
            )
        if not known and (administrative or not self.needs_key):
            which = f"the origin `{origins[0][:_QUOTED_CHARACTERS_MAX]}`" if origins else "another origin"
            raise RequestError(
                Code.ORIGIN_NOT_ALLOWED,
                f"Requests from {which} are refused. To allow a web page or a desktop application, start the "
                "server with `--cors-origins` and its origin.",
            )

    def _is_configured(self, origin: str) -> bool:
        return "*" in self.cors_origins or origin in self.cors_origins


def is_administrative(path: str) -> bool:
    """Return whether the path is one of `ADMINISTRATIVE_PATHS`, or below one."""
    return any(path == known or path.startswith(f"{known}/") for known in ADMINISTRATIVE_PATHS)


def _read_fields(headers: Headers) -> Fields:
    fields: Fields = {name.decode(): [] for name in _FIELDS}
    for name, value in headers:
        if name in _FIELDS:
            fields[name.decode()].append(value.decode("ascii", "backslashreplace").strip(" \t"))
    return fields


def _host_of(fields: Fields, http_version: str) -> Authority | None:
    """Return the Host header; None for a client of HTTP/1.0 that sends none. Raises `RequestError`."""
    hosts = fields["host"]
    if not hosts and http_version == "1.0":
        return None
    if len(hosts) != 1:
        amount = "is missing" if not hosts else "was sent more than once"
        raise RequestError(Code.INVALID_REQUEST, f"The header host {amount}.")
    try:
        return read_authority(hosts[0])
    except ValueError as error:
        raise RequestError(Code.INVALID_REQUEST, "The header host is not a host with a port.") from error


def _is_same(origin: str, host: Authority | None) -> bool:
    """Return whether an origin is that of this server, as the client addresses it.

    Only the host and the port count, because TLS may end at a proxy.
    """
    scheme, _, authority = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if host is None or port is None:
        return False
    try:
        page = read_authority(authority)
    except ValueError:
        return False
    return page.host == host.host and (page.port or port) == (host.port or port)


def _is_foreign_resource(method: str, fields: Fields) -> bool:
    """Return whether a page of another origin loads this as an image, a script or the like, without Origin.

    A link or an address that leads here is no such request.
    """
    if fields["origin"] or not _is_cross_site(fields):
        return False
    return method not in ("GET", "HEAD") or fields["sec-fetch-mode"] != ["navigate"]


def _is_cross_site(fields: Fields) -> bool:
    return any(site not in ("same-origin", "none") for site in fields["sec-fetch-site"])


def _check_content_type(fields: Fields) -> None:
    """Check that a page sends JSON, for which a browser asks first. Raises `RequestError`.

    Other clients may send any type: `curl -d` names the one of a form.
    """
    if not fields["origin"] and not _is_cross_site(fields):
        return
    types = [value.partition(";")[0].rstrip().lower() for value in fields["content-type"]]
    has_body = bool(fields["transfer-encoding"]) or fields["content-length"] not in ([], ["0"])
    if types == [JSON] or (not types and not has_body):
        return
    sent = f"not `{types[0][:_QUOTED_CHARACTERS_MAX]}`" if types else "and this request names none"
    raise RequestError(
        Code.UNSUPPORTED_CONTENT_TYPE, f"The content type of a web page's request must be {JSON}, {sent}."
    )


class LocalCORSMiddleware(CORSMiddleware):
    """CORS middleware whose preflights allow known origins a server in their local network, under the name of
    Private Network Access and that of its successor."""

    def preflight_response(self, request_headers: StarletteHeaders) -> Response:
        """Return the response to a preflight. Starlette's would allow the network to unknown origins too."""
        response = super().preflight_response(request_headers)
        for network in ("private", "local"):
            name = f"access-control-allow-{network}-network"
            if response.status_code != 200:
                del response.headers[name]
            elif f"access-control-request-{network}-network" in request_headers:
                response.headers[name] = "true"
        return response


class OriginMiddleware:
    """ASGI middleware that refuses what the policy refuses, except for health probes.

    Probes are exempt, because load balancers send any Host, or none; their answers are no secret.
    """

    def __init__(self, app: ASGIApp, policy: OriginPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            try:
                self._policy.check(scope["method"], scope["path"], scope["http_version"], scope["headers"])
            except RequestError as error:
                log_refusal(log, scope, error)
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
