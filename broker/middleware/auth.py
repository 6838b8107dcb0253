"""Authentication: API keys, and the middleware that checks them.

Keys are stored as SHA-256 digests and never logged. An offered key is compared with every valid key in
constant time and without an early exit, so that the response time reveals nothing about them.

A key file is checked before every use and read again when it has changed. If it cannot be read (missing,
accessible to others, malformed, empty), the last valid keys stay valid and the error is logged once, so that
an editing mistake locks no client out. Replace the file atomically, by renaming, or a key may be rejected
while the file is half written.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from broker.middleware.context import CONTEXT, context_of
from broker.middleware.errors import error_response, log_refusal
from protocol.common.api_keys import ApiKey, KeysError, parse
from protocol.common.secure_files import read_private
from protocol.errors import Code, RequestError

log = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready"})
"""Health probes: polled often by load balancers, without a key; "not ready" is not an error there."""
STATUS_STREAM = "/v1/status/stream"
"""What the page at `/` asks for first, to learn whether it needs a key: its refusal is no event."""
_SETTLED_S = 1.0
"""Minimum age in seconds of a file's last change; a newer file may change again within the same tick of the
file system's clock."""


class ApiKeys:
    """The valid API keys: those of the settings and those of a file."""

    def __init__(self, given: Iterable[str] = (), file: Path | None = None) -> None:
        """Raises `KeysError` or `OSError`."""
        self._from_flags = tuple(
            ApiKey.of(text, f"key {n}", f"API key {n}", is_named=False) for n, text in enumerate(given, 1)
        )
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._last_error = ""
        self._from_file: tuple[ApiKey, ...] = () if file is None else self._read(file)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._from_flags) or self._file is not None

    @property
    def prefix_namespaces(self) -> frozenset[str]:
        """The namespaces of all valid keys."""
        return frozenset(key.prefix_namespace for key in self._keys())

    def find(self, offered: bytes) -> ApiKey | None:
        """Return the valid key with these bytes, if any."""
        digest = hashlib.sha256(offered).digest()
        found = None
        for key in self._keys():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def of_namespace(self, namespace: str) -> ApiKey | None:
        """Return a valid key whose prefixes, files and batches are in `namespace`; None if there is none."""
        return next((key for key in self._keys() if key.prefix_namespace == namespace), None)

    def owners(self) -> dict[bytes, str]:
        """Return the owner of what is stored for each key, by the key's digest."""
        return {key.digest: key.prefix_namespace for key in self._keys()}

    def _keys(self) -> tuple[ApiKey, ...]:
        if self._file is not None:
            try:
                self._from_file = self._read(self._file)
                self._last_error = ""
            except (OSError, KeysError) as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    log.error("keeping the previous API keys: %s", error)
        return self._from_flags + self._from_file

    def _read(self, file: Path) -> tuple[ApiKey, ...]:
        info = file.stat()  # before reading: a change in between is noticed the next time
        seen = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_mode, info.st_uid)
        if seen == self._seen:
            return self._from_file
        keys = parse(read_private(file), str(file))
        if self._last_error or self._seen not in (None, seen):
            log.info("read %d API keys from %s", len(keys), file)
        is_stable = abs(time.time() - info.st_ctime) > _SETTLED_S
        self._seen = seen if is_stable else None
        return keys


def offered(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys in a request's headers (names in lower case).

    Raises `RequestError` for a header that occurs twice: proxies do not agree on which of them counts.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in (b"authorization", b"x-api-key"):
            continue
        if name in found:
            raise RequestError(Code.INVALID_API_KEY, f"The header {name.decode()} was sent more than once.")
        found[name] = value.strip(b" \t")
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    bearer = token.strip(b" \t") if scheme.lower() == b"bearer" else b""
    return [key for key in (bearer, found.get(b"x-api-key", b"")) if key]


class AuthMiddleware:
    """ASGI middleware that rejects requests without a valid API key, if keys are required.

    It accepts `Authorization: Bearer KEY` and `x-api-key: KEY`. The key becomes part of the request's
    context.
    """

    def __init__(self, app: ASGIApp, api_keys_store: ApiKeys, keyless: frozenset[str] = frozenset()) -> None:
        """`keyless`: paths that need no key, besides `PROBES`."""
        self._app = app
        self._api_keys = api_keys_store
        self._open = PROBES | keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._api_keys.required and scope["path"] not in self._open:
            try:
                scope[CONTEXT] = replace(context_of(scope), key=self._admit(scope))
            except RequestError as error:
                log_refusal(log, scope, error)
                response = error_response(error, scope)
                response.headers["www-authenticate"] = 'Bearer realm="roundhouse"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> ApiKey:
        keys = offered(scope["headers"])
        if not keys:
            ways = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise RequestError(Code.INVALID_API_KEY, f"No API key provided: send it as {ways}.")
        found = [self._api_keys.find(key) for key in keys]
        known = next((key for key in found if key is not None), None)
        if known is None:
            raise RequestError(Code.INVALID_API_KEY, "Incorrect API key provided.")
        return known
