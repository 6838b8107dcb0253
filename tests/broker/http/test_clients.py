"""Opaque names of clients."""

from __future__ import annotations

import hashlib

from broker.http.clients import client_of
from protocol.api_keys import ApiKey


def key(text: str) -> ApiKey:
    return ApiKey.of(text, "someone", "here")


def test_client_is_its_key_or_its_address() -> None:
    names = {client_of(key("a"), "10.0.0.1"), client_of(key("b"), "10.0.0.1")}
    names |= {client_of(None, "10.0.0.1"), client_of(None, "10.0.0.2"), client_of(None, "")}
    assert len(names) == 5
    assert client_of(key("a"), "10.0.0.9") == client_of(key("a"), "10.0.0.1")


def test_client_reveals_neither_key_nor_address() -> None:
    name = client_of(key("secret"), "10.0.0.1")
    assert len(name) == 16
    assert name not in key("secret").digest.hex()
    assert client_of(None, "10.0.0.1") != hashlib.blake2b(b"10.0.0.1", digest_size=8).hexdigest()
