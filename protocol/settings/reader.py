"""Settings of a process. Precedence: flags, ROUNDHOUSE_* environment variables, one TOML file, defaults.

Settings are a frozen `msgspec.Struct` whose fields are `Annotated[type, Meta(description=…)]`. The field
`max_waiting` of the section `gateway` is `--max-waiting`, `ROUNDHOUSE_MAX_WAITING` and `max_waiting` under
`[gateway]`. With `rename=public_name`, the unit at the end of a field's name is internal. A list (a field of
type `tuple[str, ...]`, its name in the plural) is comma-separated in text; its flag may be repeated, and
written in the singular. All errors are reported at once, each with its source.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
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

Seconds = Annotated[float, Meta(gt=0, le=86400)]
DrainTimeout = Annotated[
    float,
    Meta(
        ge=0,
        le=86400,
        description="seconds that requests have to finish when the gateway or a worker stops; what is"
        " left of a worker's continues on the next one",
    ),
]

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


class SettingsError(ValueError):
    """All errors in a process's settings, one per line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


class Given(NamedTuple):
    """Value of a setting with its source. Text is parsed, a typed TOML value is not. `own`: it stands in the
    process's own section of the file. `label`: what precedes the setting's name in messages."""

    value: object
    source: str
    typed: bool = False
    own: bool = False
    label: str = ""


Values = dict[str, Given]
"""Settings that are given, by their public names."""


class Sources:
    """Flags, variables and file of a process, each read once. `errors`: what is wrong, one line each."""

    def __init__(
        self,
        flags: Sequence[Flag],
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        program: str,
        about: str,
        elsewhere: Mapping[str, type[msgspec.Struct]] | None = None,
    ) -> None:
        """`elsewhere`: other processes' settings, by section, for error messages. Raises `SettingsError`;
        `--help` prints and exits."""
        if broken := faults(environ):
            raise SettingsError("\n".join(broken))
        self._flags, unknown = parse_flags(flags, argv, program, about)
        if unknown:
            names = [flag.field for flag in flags]
            raise SettingsError("\n".join(unknown_flags(unknown, names, elsewhere or {}, program)))
        self._environ = environ
        removed = [_ENV + name.upper() for name in REMOVED if _ENV + name.upper() in environ]
        self.errors = [f"{name}: {setting_hint(name.removeprefix(_ENV).lower(), ())[2:]}" for name in removed]
        config: Any = self._flags.pop("config", None) or environ.get(_ENV + "CONFIG")
        self.config: str | None = config or None
        self.document = _read_file(Path(self.config), self.errors) if self.config else {}

    def table(self, section: str) -> dict[str, Any]:
        """Return a section of the file; empty if it is missing or, which is an error, no table."""
        table = self.document.get(section, {})
        if isinstance(table, dict):
            return table
        self.errors.append(f"{self.config}: {section} must be a table")
        return {}

    def check_keys(self, section: str, known: Collection[str]) -> None:
        """Add an error for each unknown key of a section."""
        self.errors += [
            f"{self.config}: unknown key {key} in [{section}]{setting_hint(key, known)}"
            for key in self.table(section)
            if key not in known
        ]

    def values(self, kind: type[msgspec.Struct], *sections: str) -> Values:
        """Return the given settings of `kind`. Of `sections`, later ones override; the first one is the
        process's own."""
        found: Values = {}
        for section in sections:
            source, own = f"{self.config} [{section}]", section == sections[0]
            table = self.table(section)
            found |= {key: Given(value, source, typed=True, own=own) for key, value in table.items()}
        for name in kind.__struct_encode_fields__:
            if (variable := _ENV + name.upper()) in self._environ:
                found[name] = Given(self._environ[variable], variable)
            if name in self._flags:
                found[name] = Given(self._flags[name], "--" + name.replace("_", "-"))
        return {name: given for name, given in found.items() if name in kind.__struct_encode_fields__}

    def check(self) -> None:
        """Raise `SettingsError` if there are errors."""
        if self.errors:
            raise SettingsError("\n".join(dict.fromkeys(self.errors)))


def read(
    kind: type[S], section: str, argv: Sequence[str], environ: Mapping[str, str], *, program: str, about: str
) -> S:
    """Read the settings of a process that runs alone.

    Raises `SettingsError`; `--help` prints and exits.
    """
    sources = Sources(flags(kind), argv, environ, program=program, about=about)
    sources.check_keys(section, kind.__struct_encode_fields__)
    settings = convert(kind, sources.values(kind, section), sources.errors)
    sources.check()
    assert settings is not None, "there are no errors"
    return settings


def read_or_exit(
    kind: type[S],
    section: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str,
    about: str,
    document: bytes | None = None,
) -> S:
    """Return the settings for a `__main__`: those of `document`, which `serve` has sent as JSON, else those
    that `read` finds. Errors go to stderr, and the exit status is EX_CONFIG."""
    try:
        if document is not None:
            return msgspec.json.decode(document, type=kind, dec_hook=_to_path)
        return read(kind, section, argv, environ, program=program, about=about)
    except (SettingsError, msgspec.MsgspecError) as error:
        exit_with(program, error)


def parse_flags(
    flags: Sequence[Flag], argv: Sequence[str], program: str, about: str = ""
) -> tuple[dict[str, object], list[str]]:
    """Return the values of the flags in `argv`, unvalidated, `config` among them, and the unknown words.

    Raises `SettingsError`; `--help` prints and exits.
    """
    given, unknown = _parser(flags, program, about).parse_known_args(list(argv))
    return vars(given), unknown


def of_table(kind: type[msgspec.Struct], name: str, value: object, source: str, label: str) -> Given:
    """Return a value in the table of a model. There "8" is valid as a number, and 8 as a name."""
    hint, typed = _hints(kind)[name], Given(value, source, typed=True, label=label)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or _is_switch(hint):
        return typed
    text = Given(str(value), source, label=label)
    return text if _is_valid(hint, text) and not _is_valid(hint, typed) else typed


def exit_with(program: str, reason: str | Exception) -> NoReturn:
    """Print `reason` and exit with EX_CONFIG, for errors that only a person can fix."""
    message = describe_os_error(reason) if isinstance(reason, Exception) else reason
    for line in message.splitlines():
        print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(EXIT_CONFIGURATION)


def _help_text(hint: Any, default: object) -> str:
    """Return the outermost description of a field, with its default."""
    text = next((meta.description for meta in get_args(hint)[:0:-1] if isinstance(meta, Meta)), None) or ""
    if default is False or default in (None, "", (), msgspec.NODEFAULT):
        return text
    return f"{text} (default: {spell_size(cast(int, default)) if _is_size(hint) else default})"


def _is_size(hint: Any) -> bool:
    return any(part is BYTES for part in _parts(hint))


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
    hints = _hints(kind)
    return [
        _flag(name, hints[name], _help_text(hints[name], field.default), field.name)
        for field in msgspec.structs.fields(kind)
        for name in (field.encode_name,)
    ]


@functools.cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of the settings by their public names."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _flag(name: str, hint: Any, help_text: str, field: str) -> Flag:
    flag = "--" + name.replace("_", "-")
    if _is_switch(hint):
        return Flag(name, (*_SHORT.get(name, ()), flag, f"--no-{flag[2:]}"), "", help_text)
    if _is_list(hint):
        names = tuple(dict.fromkeys((flag, flag.removesuffix("s"))))
        return Flag(name, names, "A[,B…]", help_text, is_list=True)
    return Flag(name, (flag,), "SIZE" if _is_size(hint) else _metavar(field, hint), help_text)


def _parser(flags: Sequence[Flag], program: str, about: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar=CONFIG_FLAG.metavar, help=CONFIG_FLAG.help)
    for flag in flags:
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
    """Yield the types of a hint and what they are annotated with, without unions around them."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        for part in get_args(hint):
            yield from _parts(part)
    else:
        yield hint


def _read_file(path: Path, errors: list[str]) -> dict[str, Any]:
    """Return the TOML file; empty if it cannot be read, which is an error."""
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
    unknown = [name for name in document if name not in SECTIONS]
    errors += [f"{path}: unknown section [{name}]{closest_match(name, SECTIONS)}" for name in unknown]
    return document


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


def convert(kind: type[S], values: Values, errors: list[str]) -> S | None:
    """Return the settings of a process; None if some are wrong, which adds a line for each to `errors`."""
    converted, wrong = {}, list[str]()
    hints = _hints(kind)
    for field in msgspec.structs.fields(kind):
        name, given = field.encode_name, values.get(field.encode_name)
        if given is None:
            wrong += [f"{name}: is required"] if field.required else []
            continue
        try:
            converted[field.name] = _as_hinted(hints[name], given)
        except (msgspec.ValidationError, SizeError) as error:
            wrong.append(f"{given.label}{name}: {describe(error, hints[name])} (from {given.source})")
    if not wrong:
        try:
            return kind(**converted)
        except ValueError as error:  # from the struct's __post_init__, which checks several fields together
            wrong.append(str(error))
    errors += wrong
    return None


def _as_hinted(hint: Any, given: Given) -> Any:
    """Convert a value to its field's type. Raises `ValidationError` or `SizeError`."""
    value, typed = given.value, given.typed
    if isinstance(value, str) and _is_size(hint):
        value = parse_size(value)
    if _is_list(hint) and (isinstance(value, str) or not typed):
        value = _split(value)
    return msgspec.convert(value, hint, strict=typed, dec_hook=_to_path)


def _is_valid(hint: Any, given: Given) -> bool:
    try:
        _as_hinted(hint, given)
    except (msgspec.ValidationError, SizeError):
        return False
    return True


def describe(error: Exception, hint: Any) -> str:
    """Return the error of a value for people, without msgspec's names of types. `hint`: the expected type."""
    text = str(error)
    if choices := _choices(hint):
        text = text.replace("Invalid enum value", f"Expected {' or '.join(choices)}, not")
    return _TYPES.sub(lambda found: " or ".join(map(_type_name, found[1].split(" | "))), text)


def _type_name(name: str) -> str:
    return _TYPE_NAMES.get(name, name)
