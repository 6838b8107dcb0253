"""Names of adapters: how settings and clients write them, and how they divide the prefix cache. Pure.

A setting is NAME=FOLDER. A client asks for MODEL:NAME, or names the adapter in a field of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from protocol.common.model_folder import expand_user

ADAPTERS_MAX = 64
"""Maximum number of adapters of a model."""
SEPARATOR = ":"
_NAME = re.compile(r"[A-Za-z0-9_.@+-]{1,100}")
_MARK = "\0"


SETTING = rf"^{_NAME.pattern}=[\s\S]+$"
"""Pattern of a setting."""


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter can be called so: 1 to 100 letters, digits and `_.@+-`."""
    return _NAME.fullmatch(name) is not None


def split_setting(word: str) -> tuple[str, Path] | None:
    """Split NAME=FOLDER; None: it is something else."""
    name, equals, folder = word.partition("=")
    if not (equals and folder and is_adapter_name(name)):
        return None
    return name, expand_user(Path(folder)).absolute()


def problem_with(words: tuple[str, ...]) -> str | None:
    """Return what is wrong with the settings of a model's adapters, as one sentence; None: nothing."""
    pairs = [split_setting(word) for word in words]
    for word, pair in zip(words, pairs, strict=True):
        if pair is None:
            return f"adapters: {word[:80]!r} must be NAME=FOLDER, with letters, digits and _.@+- in the name"
    names = [pair[0] for pair in pairs if pair is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"adapters: {twice[0]} is named twice"
    return f"adapters: at most {ADAPTERS_MAX} are served" if len(names) > ADAPTERS_MAX else None


def salt_with(salt: str, digest: str) -> str:
    """Return a salt for requests with the adapter `digest`; empty: without an adapter. Different pairs have
    different salts, and a salt stays in its namespace."""
    return f"{salt}{_MARK}{digest}" if digest or _MARK in salt else salt
