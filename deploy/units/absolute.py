"""Absolute paths in the settings of a service, which does not run in the folder it was installed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.serving.commandlines import flag_words
from deploy.serving.models import split_name
from deploy.serving.resolution import Resolved
from deploy.serving.settings import PROGRAM, shown_flags
from deploy.supervisor.child import split_models
from protocol.adapters import split_setting
from protocol.common.model_folder import folder_of
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import CONFIG_FLAG, SettingsError, flags, parse_flags
from protocol.settings.worker import WorkerSettings

_PREFIX = "ROUNDHOUSE_"
_FOLDER_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
_FLAGS = (CONFIG_FLAG, *flags(GatewaySettings), *flags(WorkerSettings))
_PATHS = {flag.field for flag in _FLAGS if flag.metavar in ("FILE", "DIR")}
_MODELS = ("model", "draft_model", "fallback")


def absolute_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of `serve` with absolute paths. Raises `SettingsError`."""
    given, unknown = parse_flags(shown_flags(), argv, PROGRAM)
    words = [
        flag
        for name, value in given.items()
        for each in (value if isinstance(value, list) else [value])
        for flag in flag_words(name, _absolute(name, each))
    ]
    return [*words, *unknown]


def absolute_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with absolute paths in the variables that are settings."""
    found = dict(environ)
    for name in (*_PATHS, *_MODELS, "adapters"):
        if value := found.get(variable := _PREFIX + name.upper()):
            found[variable] = str(_absolute(name, value))
    return found | {name: _path(found[name]) for name in _FOLDER_VARIABLES if found.get(name)}


def check_file(resolved: Resolved) -> None:
    """Raise `SettingsError` for relative paths in the file, which cannot be changed for the service."""
    tables = dict(resolved.document)
    tables |= {f"models.{name}": each for name, each in tables.pop("models", {}).items()}
    wrong = [
        f"[{section}] {name}: a service needs an absolute path: {absolute} (from {resolved.config})"
        for section, table in tables.items()
        for name, value in table.items()
        if (absolute := _absolute(name, value)) != value and not str(value).startswith("~")
    ]
    if wrong:
        raise SettingsError("\n".join(wrong))


def _absolute(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(name, each) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if name in _PATHS:
        return _path(value)
    if name == "adapters":
        return ",".join(map(_adapter, value.split(",")))
    if name in _MODELS:
        convert = _plan if name == "fallback" else _named_model
        return ",".join(map(convert, value.split(",")))
    return value


def _adapter(word: str) -> str:
    pair = split_setting(word.strip())
    return word if pair is None else f"{pair[0]}={pair[1]}"


def _path(value: str) -> str:
    return str(Path(value).expanduser().absolute())


def _named_model(word: str) -> str:
    name, model = split_name(word)
    return _model(word) if name is None else f"{name}={_model(model)}"


def _model(word: str) -> str:
    """Return a folder as an absolute path, and anything else, such as an id, as it is."""
    return _path(word) if word and folder_of(word).exists() else word


def _plan(word: str) -> str:
    model, hosts = split_models(word)
    return _model(model or "") + (f"@{_path(hosts)}" if hosts else "")
