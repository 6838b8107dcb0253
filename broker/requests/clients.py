"""Opaque names of clients, by which workers prepare the requests of several clients in turn."""

from __future__ import annotations

import hashlib
import secrets

from protocol.common.api_keys import ApiKey

_SALT = secrets.token_bytes(16)
"""Of this process: a name reveals neither a key nor an address, and means nothing elsewhere."""


def client_of(key: ApiKey | None, host: str) -> str:
    """Return the name of the client with this API key or, without one, at this address."""
    identity = host.encode(errors="replace") if key is None else key.digest
    return hashlib.blake2b(identity, digest_size=8, key=_SALT).hexdigest()
