"""How a process reads its settings: flags over ROUNDHOUSE_* variables over one TOML file over defaults.

Settings are a frozen `msgspec.Struct` whose fields are `Annotated[type, Meta(description=…)]`; the field
`max_waiting` of the section `gateway` is `--max-waiting`, `ROUNDHOUSE_MAX_WAITING` and `max_waiting` under
`[gateway]`; with `rename=public_name` a unit at the end of a field's name is for our code only. A list (a
field of type `tuple[str, ...]`, its name in the plural) is separated by commas in text; its flag may be
repeated, and written in the singular. Everything wrong is reported at once, each with the place it came from.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from protocol import sizes
from protocol.wording import in_words, meant, strangers

EXIT_CONFIGURATION = 78
"""sysexits' EX_CONFIG: starting again will not help until a person changes something."""

SECTIONS = ("serve", "gateway", "worker", "models")
_ENV = "ROUNDHOUSE_"
S = TypeVar("S", bound=msgspec.Struct)


def public_name(field: str) -> str:
    """What people call the setting: seconds go without saying. For a settings struct's `rename`."""
    return field.removesuffix("_s")


class SettingsError(ValueError):
    """All that is wrong with a process's settings, one line each."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


class _Given(NamedTuple):
    """A value and where it came from. Flags and variables are text; a TOML value has a type of its own."""

    value: object
    source: str
    typed: bool = False


def read(
    kind: type[S],
    section: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str,
    about: str,
    elsewhere: Mapping[str, type[msgspec.Struct]] | None = None,
) -> S:
    """The settings of a process. `elsewhere`: those of others that have no flag here, by their section.

    Raises `SettingsError`; `--help` prints and exits.
    """
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    given, unknown = _parser(kind, program, about).parse_known_args(list(argv))
    if unknown:
        raise SettingsError("\n".join(strangers(unknown, fields, elsewhere or {}, program)))
    flags = vars(given)
    config = flags.pop("config", None) or environ.get(_ENV + "CONFIG")
    errors: list[str] = []
    values: dict[str, _Given] = {}
    if config:
        values |= _from_file(Path(config), section, kind, errors)
    for name in fields:
        if (variable := _ENV + name.upper()) in environ:
            values[name] = _Given(environ[variable], variable)
        if name in flags:
            values[name] = _Given(flags[name], "--" + name.replace("_", "-"))
    settings = _convert(kind, values, errors)
    if settings is None:
        raise SettingsError("\n".join(errors))
    return settings


def config_file(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The TOML file that `read` takes. Raises `SettingsError`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found: str | None = parser.parse_known_args(list(argv))[0].config
    return found or environ.get(_ENV + "CONFIG") or None


def read_or_exit(
    kind: type[S], section: str, argv: Sequence[str], environ: Mapping[str, str], *, program: str, about: str
) -> S:
    """`read` for a `__main__`: what is wrong goes to stderr, and the exit status is EX_CONFIG."""
    try:
        return read(kind, section, argv, environ, program=program, about=about)
    except SettingsError as error:
        exit_with(program, error)


def unknown_keys(
    kind: type[msgspec.Struct], section: str, table: Mapping[str, object], path: str | Path
) -> list[str]:
    """A line for each key of a section that is no setting."""
    known = kind.__struct_encode_fields__
    return [
        f"{path}: unknown key {key} in [{section}]{meant(key, known)}" for key in table if key not in known
    ]


def refusal(kind: type[msgspec.Struct], name: str, value: object) -> str | None:
    """Why a process refuses a TOML value that it is told by a flag, `--name=value`; None: it takes it.

    A flag is text: "8" is a number to it, and 8 a name. A switch has a flag without a value.
    """
    (hint,) = (
        get_type_hints(kind, include_extras=True)[field.name]
        for field in msgspec.structs.fields(kind)
        if field.encode_name == name
    )
    why = _why_not(hint, _Given(value, "", typed=True))
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool) and not _is_switch(hint)
    if why is None or not is_text:
        return why
    return why if _why_not(hint, _Given(str(value), "")) else None


def exit_with(program: str, reason: str | Exception) -> NoReturn:
    """End the process for a reason only a person can mend."""
    message = in_words(reason) if isinstance(reason, Exception) else reason
    for line in message.splitlines():
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(EXIT_CONFIGURATION)


def _describe(hint: Any) -> str:
    metas = [m for m in get_args(hint)[1:] if isinstance(m, msgspec.Meta)]
    return next((m.description for m in metas if m.description), "")


def _is_size(hint: Any) -> bool:
    return any(meta is sizes.BYTES for meta in _metas(hint))


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    for part in get_args(hint):
        if isinstance(part, msgspec.Meta):
            yield part
        else:
            yield from _metas(part)


def _is_switch(hint: Any) -> bool:
    return _bare(hint) in (bool, bool | None)


def _is_list(hint: Any) -> bool:
    return get_origin(_bare(hint)) is tuple


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _parser(kind: type[msgspec.Struct], program: str, about: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a TOML file with the same settings")
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        flag = "--" + field.encode_name.replace("_", "-")
        help_text = _describe(hints[field.name])
        if field.default is not msgspec.NODEFAULT and field.default not in (None, "", ()):
            default = sizes.spell(field.default) if _is_size(hints[field.name]) else field.default
            help_text += f" (default: {default})"
        help_text = help_text.replace("%", "%%")
        if _is_switch(hints[field.name]):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
        elif _is_list(hints[field.name]):
            names = dict.fromkeys((flag, flag.removesuffix("s")))
            parser.add_argument(*names, metavar="A[,B…]", action="append", help=help_text)
        else:
            metavar = "SIZE" if _is_size(hints[field.name]) else _metavar(field.name)
            parser.add_argument(flag, metavar=metavar, help=help_text)
    return parser


def _metavar(field: str) -> str:
    return "SECONDS" if field != public_name(field) else field.rsplit("_", 1)[-1].upper()


def _from_file(path: Path, section: str, kind: type[msgspec.Struct], errors: list[str]) -> dict[str, _Given]:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        errors.append(in_words(error))
        return {}
    except ValueError as error:
        errors.append(f"{path} is no TOML: {error}")
        return {}
    errors += [
        f"{path}: unknown section [{name}]{meant(name, SECTIONS)}"
        for name in document
        if name not in SECTIONS
    ]
    table = document.get(section, {})
    if not isinstance(table, dict):
        errors.append(f"{path}: {section} must be a table")
        return {}
    errors += unknown_keys(kind, section, table, path)
    known = kind.__struct_encode_fields__
    return {
        key: _Given(value, f"{path} [{section}]", typed=True) for key, value in table.items() if key in known
    }


def _to_path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    raise ValueError("Expected a path")


def _split(value: object) -> list[str]:
    texts = value if isinstance(value, list) else [str(value)]
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _convert(kind: type[S], values: dict[str, _Given], errors: list[str]) -> S | None:
    converted = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        name, hint = field.encode_name, hints[field.name]
        if name not in values:
            errors += [f"{name}: is required"] if field.required else []
            continue
        try:
            converted[field.name] = _as_hinted(hint, values[name])
        except (msgspec.ValidationError, sizes.SizeError) as error:
            errors.append(f"{name}: {error} (from {values[name].source})")
    if errors:
        return None
    try:
        return kind(**converted)
    except ValueError as error:  # from the struct's own __post_init__: rules across fields
        errors.append(str(error))
        return None


def _as_hinted(hint: Any, given: _Given) -> Any:
    """Raises `ValidationError` or `SizeError`."""
    value, _, typed = given
    if isinstance(value, str) and _is_size(hint):
        value = sizes.parse(value)
    if _is_list(hint) and (isinstance(value, str) or not typed):
        value = _split(value)
    return msgspec.convert(value, hint, strict=typed, dec_hook=_to_path)


def _why_not(hint: Any, given: _Given) -> str | None:
    try:
        _as_hinted(hint, given)
    except (msgspec.ValidationError, sizes.SizeError) as error:
        return str(error)
    return None
