"""Error texts for people: suggestions for misspelt names, system errors, unknown flags."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

_ALIKE_MIN = 0.7
"""Minimum similarity (0 to 1) of a name that is suggested."""

_OTHERS = "other settings are environment variables or keys of the file (docs/operating.md)"

_REFUSALS = {
    errno.ENOENT: "no such file or folder",
    errno.EACCES: "permission denied: check its permissions and those of its parent folders",
    errno.EISDIR: "is a folder, but a file is required",
    errno.ENOTDIR: "its parent is a file, not a folder",
    errno.ENOSPC: "the disk is full",
}


def closest_match(name: str, known: Iterable[str]) -> str:
    """Return a suggestion (“; did you mean …?”) to append to an unknown name, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=_ALIKE_MIN)
    return f"; did you mean {found[0]}?" if found else ""


def describe_os_error(error: Exception) -> str:
    """Return the error's text; for an `OSError` with a file name, which file it is and what to do."""
    if isinstance(error, OSError) and error.filename is not None and error.errno is not None:
        return f"{error.filename}: {_REFUSALS.get(error.errno, error.strerror)}"
    return str(error)


def unknown_flags(
    words: Sequence[str],
    known: Iterable[str],
    elsewhere: Mapping[str, type[msgspec.Struct]],
    program: str,
) -> Iterator[str]:
    """Yield an error line for each unknown flag; a word behind a flag counts as its value.

    `known`: names of settings. `elsewhere`: settings that are no flags of this command, by file section.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        yield f"{words[0]}: unexpected argument; see {program} --help"
    names = ["--" + name.replace("_", "-") for name in known]
    for flag in flags:
        name = flag.lstrip("-").replace("-", "_")
        sections = [each for each, kind in elsewhere.items() if name in kind.__struct_encode_fields__]
        if sections:
            way = f"set ROUNDHOUSE_{name.upper()}, or {name} under [{sections[0]}] in the file"
            yield f"{flag}: not a flag of this command; {way}"
        else:
            yield f"{flag}: no such flag{closest_match(flag, names) or f'; see {program} --help; {_OTHERS}'}"


def in_bytes(count: int) -> str:
    """Format an amount of memory."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
