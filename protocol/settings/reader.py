"""Settings of a process. Precedence: flags, ROUNDHOUSE_* environment variables, one TOML file, defaults.

Settings are a frozen `msgspec.Struct` whose fields are `Annotated[type, Meta(description=…)]`. The field
`max_waiting` of the section `gateway` is `--max-waiting`, `ROUNDHOUSE_MAX_WAITING` and `max_waiting` under
`[gateway]`. With `rename=public_name`, the unit at the end of a field's name is internal. A list (a field of
type `tuple[str, ...]`, its name in the plural) is comma-separated in text; its flag may be repeated, and
written in the singular. All errors are reported at once, each with its source.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from protocol.common.environment import faults
from protocol.common.error_text import REMOVED, closest_match, describe_os_error, setting_hint, unknown_flags
from protocol.common.text_files import EncodingError, read_text

EXIT_CONFIGURATION = 78
"""sysexits' EX_CONFIG: a restart does not help until a person changes something."""

SECTIONS = ("serve", "gateway", "worker", "models")
_ENV = "ROUNDHOUSE_"
S = TypeVar("S", bound=msgspec.Struct)

BYTES = Meta(ge=0, le=2**62)
Size = Annotated[int, BYTES]
"""A setting in bytes, which `protocol.settings.reader` also accepts as a human-readable size."""

_POWERS = "KMGT"
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,18})?)\s*(?:([KMGT])(I?B)?|B)?\s*", re.ASCII | re.IGNORECASE)


_TYPES = re.compile(r"`([a-z]+(?: \| [a-z]+)*?)(?: \| null)?`")
_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
"""Names of msgspec's types for people."""


class SizeError(ValueError):
    """An invalid size."""


def parse_size(text: str) -> int:
    """Return a size in bytes, rounded down. `KB` is 1000, `KiB` and `K` are 1024. Raises `SizeError`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise SizeError(
            f"Expected a size in bytes or with KB, MB, GB, TB, KiB, MiB, GiB or TiB, not {text[:32]!r}"
        )
    number, unit, form = found.groups()
    base = 1000 if (form or "").upper() == "B" else 1024
    power = _POWERS.index(unit.upper()) + 1 if unit else 0
    return int(Fraction(number) * base**power)


def spell_size(size: int) -> str:
    """Return the shortest exact form of `size`: whole KiB, MiB, GiB or TiB, else bytes."""
    power = 0
    while size and power < len(_POWERS) and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{size}{_POWERS[power - 1]}iB" if power else str(size)


def public_name(field: str) -> str:
    """Return a setting's public name, without the unit `_s`. For a settings struct's `rename`."""
    return field.removesuffix("_s")


def passes_on(*others: tuple[type[msgspec.Struct], Sequence[str]]) -> Callable[[type[S]], type[S]]:
    """Return a class decorator that adds settings of other processes, each with the fields to add.

    An added setting keeps its type, bounds and description. Its default means that it was not given, None or
    (), and its description states the default of the other process. A field that the class itself declares
    is replaced in its place; static type checkers know only these fields.
    """

    def complete(kind: type[S]) -> type[S]:
        added = {field[0]: field for other, names in others for field in _not_given(other, names)}
        struct = msgspec.defstruct(
            kind.__name__,
            added.values(),
            bases=(kind,),
            module=kind.__module__,
            namespace={"__doc__": kind.__doc__},
            frozen=True,
            kw_only=True,
            rename=public_name,
        )
        return cast("type[S]", struct)

    return complete


def _not_given(
    kind: type[msgspec.Struct], names: Sequence[str]
) -> Iterator[tuple[str, Any, tuple[()] | None]]:
    """Yield the fields `names` of `kind` for `msgspec.defstruct`, in the order of `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        if field.name in names:
            hint = hints[field.name]
            described = msgspec.Meta(description=_help_text(hint, field.default))
            yield field.name, Annotated[hint, described], () if _is_list(hint) else None


class SettingsError(ValueError):
    """All errors in a process's settings, one per line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


class _Given(NamedTuple):
    """A value and its source. Flags and variables are text; a TOML value is typed."""

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
    """Read the settings of a process. `elsewhere`: other processes' settings, by section, for error messages.

    Raises `SettingsError`; `--help` prints and exits.
    """
    if broken := faults(environ):
        raise SettingsError("\n".join(broken))
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    given, unknown = _parser(kind, program, about).parse_known_args(list(argv))
    if unknown:
        raise SettingsError("\n".join(unknown_flags(unknown, fields, elsewhere or {}, program)))
    flags = vars(given)
    config = flags.pop("config", None) or environ.get(_ENV + "CONFIG")
    removed = [_ENV + name.upper() for name in REMOVED if _ENV + name.upper() in environ]
    errors = [f"{name}: {setting_hint(name.removeprefix(_ENV).lower(), ())[2:]}" for name in removed]
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


def given_flags(
    kind: type[msgspec.Struct], argv: Sequence[str], program: str
) -> tuple[dict[str, object], list[str]]:
    """Return the values of the flags in `argv`, unvalidated, `config` among them, and the unknown words.

    Raises `SettingsError`.
    """
    given, unknown = _parser(kind, program, "").parse_known_args(list(argv))
    return vars(given), unknown


def path_fields(kind: type[msgspec.Struct]) -> set[str]:
    """Return the public names of the settings that are paths."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return {field.encode_name for field in fields if Path in _parts(hints[field.name])}


def config_file(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the path of the TOML file that `read` would use. Raises `SettingsError`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found: str | None = parser.parse_known_args(list(argv))[0].config
    return found or environ.get(_ENV + "CONFIG") or None


def read_or_exit(
    kind: type[S], section: str, argv: Sequence[str], environ: Mapping[str, str], *, program: str, about: str
) -> S:
    """Call `read` for a `__main__`: errors go to stderr, and the exit status is EX_CONFIG."""
    try:
        return read(kind, section, argv, environ, program=program, about=about)
    except SettingsError as error:
        exit_with(program, error)


def unknown_keys(
    kind: type[msgspec.Struct], section: str, table: Mapping[str, object], path: str | Path
) -> list[str]:
    """Return an error line for each unknown key of a section."""
    known = kind.__struct_encode_fields__
    return [
        f"{path}: unknown key {key} in [{section}]{setting_hint(key, known)}"
        for key in table
        if key not in known
    ]


def refusal(kind: type[msgspec.Struct], name: str, value: object) -> str | None:
    """Return why a TOML value is invalid when passed on as a flag, `--name=value`; None: it is valid.

    A flag is text, so "8" is valid as a number and 8 as a name. A switch is a flag without a value.
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
    """Print `reason` and exit with EX_CONFIG, for errors that only a person can fix."""
    message = describe_os_error(reason) if isinstance(reason, Exception) else reason
    for line in message.splitlines():
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(EXIT_CONFIGURATION)


def _help_text(hint: Any, default: object) -> str:
    """Return the outermost description of a field, with its default."""
    metas = [m for m in get_args(hint)[1:] if isinstance(m, msgspec.Meta)]
    text = next((m.description for m in reversed(metas) if m.description), "")
    if default is False or default in (None, "", (), msgspec.NODEFAULT):
        return text
    return f"{text} (default: {spell_size(cast(int, default)) if _is_size(hint) else default})"


def _is_size(hint: Any) -> bool:
    return any(meta is BYTES for meta in _metas(hint))


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


class Flag(NamedTuple):
    """A flag of a settings struct, as help and shell completion show it. `names`: the first one is used in
    messages. `metavar`: empty for a switch."""

    field: str
    names: tuple[str, ...]
    metavar: str
    help: str
    is_list: bool = False


CONFIG_FLAG = Flag("config", ("--config",), "FILE", "TOML file with the same settings")
_SHORT = {"verbose": ("-v",)}


def flags(kind: type[msgspec.Struct]) -> list[Flag]:
    """Return the flags of a settings struct, except for `CONFIG_FLAG`."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        _flag(field.encode_name, hints[field.name], _help_text(hints[field.name], field.default), field.name)
        for field in msgspec.structs.fields(kind)
    ]


def _flag(name: str, hint: Any, help_text: str, field: str) -> Flag:
    flag = "--" + name.replace("_", "-")
    if _is_switch(hint):
        return Flag(name, (*_SHORT.get(name, ()), flag, f"--no-{flag[2:]}"), "", help_text)
    if _is_list(hint):
        names = tuple(dict.fromkeys((flag, flag.removesuffix("s"))))
        return Flag(name, names, "A[,B…]", help_text, is_list=True)
    return Flag(name, (flag,), "SIZE" if _is_size(hint) else _metavar(field, hint), help_text)


def _parser(kind: type[msgspec.Struct], program: str, about: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar=CONFIG_FLAG.metavar, help=CONFIG_FLAG.help)
    for flag in flags(kind):
        help_text = flag.help.replace("%", "%%")
        if not flag.metavar:
            names = (name for name in flag.names if not name.startswith("--no-"))
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, help=help_text)
        elif flag.is_list:
            parser.add_argument(*flag.names, metavar=flag.metavar, action="append", help=help_text)
        else:
            parser.add_argument(*flag.names, metavar=flag.metavar, help=help_text)
    return parser


def _metavar(field: str, hint: Any) -> str:
    if field != public_name(field):
        return "SECONDS"
    parts = list(_parts(hint))
    if choices := _choices(hint):
        return "|".join(choices)
    if Path in parts:
        return "FILE" if field.endswith(("_file", "hosts")) else "DIR"
    if int in parts or float in parts:
        return "PORT" if field.endswith("port") else "N"
    return field.rsplit("_", 1)[-1].upper()


def _choices(hint: Any) -> list[str]:
    literals = (part for part in _parts(hint) if get_origin(part) is Literal)
    return [str(choice) for literal in literals for choice in get_args(literal)]


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the types of a hint, without `Annotated` and unions around them."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        for part in get_args(hint):
            yield from _parts(part)
    else:
        yield hint


def _from_file(path: Path, section: str, kind: type[msgspec.Struct], errors: list[str]) -> dict[str, _Given]:
    try:
        document = tomllib.loads(read_text(path))
    except OSError as error:
        errors.append(describe_os_error(error))
        return {}
    except EncodingError as error:
        errors.append(f"{path}: {error}")
        return {}
    except ValueError as error:
        errors.append(f"{path} is not valid TOML: {error}")
        return {}
    errors += [
        f"{path}: unknown section [{name}]{closest_match(name, SECTIONS)}"
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
        try:
            return Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{value}: there is no such home") from error
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
        except (msgspec.ValidationError, SizeError) as error:
            errors.append(f"{name}: {describe(error, hint)} (from {values[name].source})")
    if errors:
        return None
    try:
        return kind(**converted)
    except ValueError as error:  # from the struct's __post_init__, which checks several fields together
        errors.append(str(error))
        return None


def _as_hinted(hint: Any, given: _Given) -> Any:
    """Convert a value to its field's type. Raises `ValidationError` or `SizeError`."""
    value, _, typed = given
    if isinstance(value, str) and _is_size(hint):
        value = parse_size(value)
    if _is_list(hint) and (isinstance(value, str) or not typed):
        value = _split(value)
    return msgspec.convert(value, hint, strict=typed, dec_hook=_to_path)


def _why_not(hint: Any, given: _Given) -> str | None:
    try:
        _as_hinted(hint, given)
    except (msgspec.ValidationError, SizeError) as error:
        return describe(error, hint)
    return None


def describe(error: Exception, hint: Any) -> str:
    """Return the error of a value for people, without msgspec's names of types. `hint`: the expected type."""
    text = str(error)
    if choices := _choices(hint):
        text = text.replace("Invalid enum value", f"Expected {' or '.join(choices)}, not")
    return _TYPES.sub(lambda found: " or ".join(map(_type_name, found[1].split(" | "))), text)


def _type_name(name: str) -> str:
    return _TYPE_NAMES.get(name, name)
