"""Who may ask: API keys, and the middleware that looks for one.

Keys are held as SHA-256 digests and never logged. A key that is offered is compared with every key in force,
each in constant time and without an early exit, so that how long a refusal takes says nothing about them.

The keys of a file are in force as the file is: it is looked at before every use and read again when it has
changed. A file that cannot be taken (gone, open to others, malformed, empty) leaves the keys that were known
in force and is complained about once: a slip while editing must not lock everybody out. Replace it in one
piece, by renaming, or a key may be refused for the moment in which the file is half written.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from broker.http.errors import error_response
from broker.http.ids import request_id
from broker.http.probes import PROBES
from protocol.about import about
from protocol.errors import Code, RequestError
from protocol.private import read_private

log = logging.getLogger(__name__)

_SETTLED_S = 1.0
"""A file changed so lately might change again within the same tick of the file system's clock."""


class KeysError(ValueError):
    """API keys that cannot be taken; the message does not contain them."""


@dataclass(frozen=True, slots=True)
class Key:
    """One API key in force. `name`: what its owner is called in the log."""

    digest: bytes = field(repr=False)
    name: str

    @classmethod
    def of(cls, text: str, name: str, where: str) -> Key:
        """Raises `KeysError`, which says `where`."""
        if not text or not all("!" <= letter <= "~" and letter != "," for letter in text):
            raise KeysError(f"{where}: a key is one word of printable ASCII, without commas")
        return cls(hashlib.sha256(text.encode("ascii")).digest(), name)


def parse(content: bytes, source: str) -> tuple[Key, ...]:
    """The keys of a file: one on each line, after it a name if wanted; `#` begins a line that is none.

    Raises `KeysError`.
    """
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise KeysError(f"{source} is not UTF-8 text") from error
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(lines, 1):
        words = line.split(None, 1)
        if not words or words[0].startswith("#"):
            continue
        name = words[1].strip() if len(words) == 2 else f"line {number}"
        key = Key.of(words[0], name, f"{source}, line {number}")
        if key.digest in keys:
            raise KeysError(f"{source}, line {number}: a key that has been there before")
        keys[key.digest] = key
    if not keys:
        raise KeysError(f"{source} holds no key")
    return tuple(keys.values())


class Keyring:
    """The keys in force: those of the settings, and those of a file."""

    def __init__(self, given: Iterable[str] = (), file: Path | None = None) -> None:
        """Raises `KeysError` or `OSError`."""
        self._given = tuple(Key.of(text, f"key {n}", f"API key {n}") for n, text in enumerate(given, 1))
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._complaint = ""
        self._filed: tuple[Key, ...] = () if file is None else self._read(file)

    @property
    def required(self) -> bool:
        """Does anybody need a key?"""
        return bool(self._given) or self._file is not None

    def find(self, offered: bytes) -> Key | None:
        """The key with these bytes, if it is in force."""
        digest = hashlib.sha256(offered).digest()
        found = None
        for key in self._keys():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _keys(self) -> tuple[Key, ...]:
        if self._file is not None:
            try:
                self._filed = self._read(self._file)
                self._complaint = ""
            except (OSError, KeysError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.error("the API keys stay as they were: %s", error)
        return self._given + self._filed

    def _read(self, file: Path) -> tuple[Key, ...]:
        info = file.stat()  # before it is read: what changes in between is seen the next time
        seen = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_mode, info.st_uid)
        if seen == self._seen:
            return self._filed
        keys = parse(read_private(file), str(file))
        if self._complaint or self._seen not in (None, seen):
            log.info("%d API keys read from %s", len(keys), file)
        settled = abs(time.time() - info.st_ctime) > _SETTLED_S
        self._seen = seen if settled else None
        return keys


def offered(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys in a request's headers (names in lower case). Raises `RequestError` for a header given twice:
    which of them counts is something that proxies do not agree about."""
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


class Guard:
    """ASGI middleware: in comes who offers a key in force, and everybody where there are no keys.

    Either header will do: `Authorization: Bearer KEY` or `x-api-key: KEY`. The key is left in the request's
    state, as `key`.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, keyless: frozenset[str] = frozenset()) -> None:
        """`keyless`: paths that need none, besides `PROBES`."""
        self._app = app
        self._keyring = keyring
        self._open = PROBES | keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keyring.required and scope["path"] not in self._open:
            try:
                scope.setdefault("state", {})["key"] = self._admit(scope)
            except RequestError as error:
                client = scope["client"][0] if scope.get("client") else "?"
                asked, told = (scope["method"], scope["path"], client), about(request_id=request_id(scope))
                log.info("%s %r from %s refused: %s", *asked, error.message, extra=told)
                response = error_response(error, scope)
                response.headers["www-authenticate"] = 'Bearer realm="roundhouse"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Key:
        keys = offered(scope["headers"])
        if not keys:
            ways = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise RequestError(Code.INVALID_API_KEY, f"You didn't provide an API key: send it as {ways}.")
        found = [self._keyring.find(key) for key in keys]
        known = next((key for key in found if key is not None), None)
        if known is None:
            raise RequestError(Code.INVALID_API_KEY, "Incorrect API key provided.")
        return known
