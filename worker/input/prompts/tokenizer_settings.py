"""Settings of a tokenizer that upstream does not find, or finds and cannot follow."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from protocol.common.model_folder import read_optional

log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"
_SIDECAR = "chat_template.json"
"""Where older processors of vision models have the chat template."""
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
_MODULES = {"chat_template_type": "mlx_lm.chat_templates", "tool_parser_type": "mlx_lm.tool_parsers"}
"""Settings that name a module of mlx-lm's; a newer one may have more."""


def mended_settings(folder: Path) -> dict[str, Any]:
    """Return settings that replace those of a folder's tokenizer_config.json; empty for most folders."""
    settings = read_optional(folder / _CONFIG)
    mended: dict[str, Any] = {}
    for key, package in _MODULES.items():
        name = settings.get(key)
        if name is not None and not _is_module(package, name):
            log.warning("%s: %s is ignored: this mlx-lm has no %r", folder / _CONFIG, key, name)
            mended[key] = None
    if not settings.get("chat_template") and not any((folder / each).exists() for each in _TEMPLATES):
        template = read_optional(folder / _SIDECAR).get("chat_template")
        if isinstance(template, str) and template:
            mended["chat_template"] = template
    return mended


def _is_module(package: str, name: object) -> bool:
    if not isinstance(name, str) or not name.isidentifier():
        return False
    return importlib.util.find_spec(f"{package}.{name}") is not None
