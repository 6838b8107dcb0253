"""CURVE keys of a set: a fresh pair for its leader and one for its followers, made for each start.

A follower that the leader starts gets them on stdin, because other users can read command lines. It ends if
they do not come: its leader has ended, or hangs.
"""

from __future__ import annotations

import os
import select
import time

import msgspec

from protocol.sockets import Curve, EndpointError

VARIABLE = "ROUNDHOUSE_RANK_KEYS"
"""Environment variable that tells a follower to read its keys from stdin; its value is `stdin`."""
BYTES_MAX = 1024
"""Limit of the line with the keys, which is also that of a terminal's line on macOS."""


def encode(keys: Curve) -> bytes:
    """Return a follower's keys as one line."""
    fields = keys.gateway_public, keys.worker_public, keys.secret
    return msgspec.json.encode([each.decode() for each in fields]) + b"\n"


def read(fd: int, wait_s: float) -> Curve:
    """Read the line with this follower's keys within `wait_s` seconds. Raises `EndpointError`."""
    until, line = time.monotonic() + wait_s, b""
    while not line.endswith(b"\n"):
        left_s = max(0.0, until - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise EndpointError(f"rank 0 has sent no keys within {wait_s:g} s")
        if not (more := os.read(fd, BYTES_MAX)) or len(line) > BYTES_MAX:
            raise EndpointError("rank 0 has sent no keys")
        line += more
    try:
        public, own, secret = msgspec.json.decode(line, type=tuple[str, str, str])
    except msgspec.MsgspecError:
        raise EndpointError("rank 0 has sent no keys") from None
    return Curve(public.encode(), own.encode(), secret.encode())
