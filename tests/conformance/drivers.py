"""Tables of the drivers, programs around real SDKs, and of their environments. A driver reads BASE_URL and
MODEL, and prints `passed/total` last. Dependencies of its packages are those that users install today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Environment:
    """`packages`: names in its language's registry, with versions. `without`: Python dependencies that are
    not installed."""

    name: str
    language: Literal["python", "javascript"]
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()


def _python(name: str, *packages: str) -> Environment:
    return Environment(name, "python", packages)


OPENAI, ANTHROPIC = "openai==3.54.0", "anthropic==2.12.0"

_JAVASCRIPT = Environment(
    "javascript",
    "javascript",
    (
        "ai@6.0.326",
        "@ai-sdk/openai-compatible@2.0.87",
        "@ai-sdk/openai@3.0.141",
        "@ai-sdk/anthropic@3.0.138",
        "openai@6.49.0",
        "@anthropic-ai/sdk@1.12.0",
        "zod@4.6.7",
    ),
)

DRIVERS: dict[str, Environment] = {
    "openai_*.py": _python(
        "openai", OPENAI, "httpx==0.28.1", "jsonschema==4.26.0", "pillow==13.0.0", "numpy==2.4.6"
    ),
    "anthropic_*.py": _python("anthropic", ANTHROPIC, "httpx==0.28.1"),
    "langchain_*.py": _python("langchain", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    "litellm_*.py": _python("litellm", "litellm==1.106.2", "mcp==2.3.0"),
    "instructor_*.py": _python("instructor", "instructor==1.17.0", ANTHROPIC),
    "pydantic_ai_*.py": _python("pydantic-ai", "pydantic-ai-slim[openai,anthropic]==2.68.0"),
    "openai_*.mjs": _JAVASCRIPT,
    "anthropic_*.mjs": _JAVASCRIPT,
    "ai_sdk*.mjs": _JAVASCRIPT,
}
"""Environments by pattern of the driver's file name."""

SUFFIXES = (".py", ".mjs")
SHARED = ("checks", "common")
"""Modules in the drivers' folders that they import."""


@dataclass(frozen=True, slots=True)
class Driver:
    path: Path
    environment: Environment

    @property
    def name(self) -> str:
        return self.path.name


def environment_of(name: str) -> Environment | None:
    """Return the environment of a driver by its file name; None if it is no driver."""
    return next((made for pattern, made in DRIVERS.items() if fnmatch(name, pattern)), None)


def drivers_in(folder: Path) -> tuple[Sequence[Driver], Sequence[str]]:
    """Return the drivers in a folder, in order, and the names of programs that are not in the table. Raises
    `OSError`."""
    programs = sorted(path for path in folder.resolve().iterdir() if path.suffix in SUFFIXES)
    found = [(path, environment_of(path.name)) for path in programs if path.stem not in SHARED]
    drivers = [Driver(path, environment) for path, environment in found if environment]
    return drivers, [path.name for path, environment in found if not environment]
