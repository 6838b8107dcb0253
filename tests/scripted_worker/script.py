"""Directions to the scripted engine, among the words of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.errors import Code, RequestError

TOKENS_DEFAULT = 32


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Script:
    tokens: int = TOKENS_DEFAULT
    slow_ms: float = 0.0
    prefill_ms: float = 0.0
    look_ms: float = 0.0
    die: int | None = None
    hang: int | None = None
    fail: int | None = None
    gpu: str = ""
    oom: bool = False
    burst: bool = False
    bad: bool = False
    blind: bool = False
    clock: bool = False
    text: str | None = None
    think: int = 0
    call: int = 0
    seen: tuple[str, ...] = ()
    """A word for each image and video, with which the output begins."""

    @classmethod
    def read(cls, text: str) -> Script:
        """Parse the directions in a prompt. Raises `RequestError` for an unknown one."""
        fields: dict[str, Any] = {}
        for word in text.split():
            if not word.startswith("!"):
                continue
            name, _, value = word[1:].partition("=")
            if name not in _DIRECTIONS:
                raise RequestError(Code.INVALID_REQUEST, f"unknown direction !{name}", param="messages")
            field_name, kind = _DIRECTIONS[name]
            fields[field_name] = kind(value)
        return cls(**fields)


_DIRECTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "tokens": ("tokens", int),
    "slow": ("slow_ms", float),
    "prefill": ("prefill_ms", float),
    "look": ("look_ms", float),
    "die": ("die", int),
    "hang": ("hang", int),
    "fail": ("fail", int),
    "gpu": ("gpu", str),
    "oom": ("oom", lambda value: True),
    "burst": ("burst", lambda value: True),
    "bad": ("bad", lambda value: True),
    "blind": ("blind", lambda value: True),
    "clock": ("clock", lambda value: True),
    "text": ("text", str),
    "think": ("think", int),
    "call": ("call", int),
}
