"""Namespaces of the prefix cache: the owner of a prefix, as part of its salt. Pure.

The gateway puts each API key's prefixes into a namespace, and a client may divide its own with `cache_salt`.
Both travel as one salt, so that a worker shares nothing between two namespaces without knowing of them. No
salt that a client sends without a namespace equals one within a namespace.
"""

from __future__ import annotations

_END = "/"


def salt_in(namespace: str, cache_salt: str) -> str:
    """Return the salt for a client's `cache_salt` in a namespace. Different pairs have different salts.

    `namespace`: letters and digits; empty for none. Then most salts stay as they are.
    """
    return f"{namespace}{_END}{cache_salt}" if namespace or _END in cache_salt else cache_salt


def contains(namespace: str, salt: str) -> bool:
    """Return whether a salt lies in a namespace. All salts lie in the empty one."""
    return not namespace or salt.startswith(namespace + _END)
