"""What goes wrong, said to a person: which name was meant, what the system has refused, what is no flag."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

_ALIKE_MIN = 0.7
"""So alike, of 1, two names must be for one to be taken for the other."""

_OTHERS = "and other settings are variables or stand in the file (docs/operating.md)"

_REFUSALS = {
    errno.ENOENT: "there is no such file or folder",
    errno.EACCES: "you may not read or write it: look at its permissions, and those of the folders above it",
    errno.EISDIR: "that is a folder, and a file is wanted",
    errno.ENOTDIR: "what stands above it is a file, and no folder",
    errno.ENOSPC: "the disk is full",
}


def meant(name: str, known: Iterable[str]) -> str:
    """Which one may be meant by an unknown name, to be said after it; or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=_ALIKE_MIN)
    return f"; did you mean {found[0]}?" if found else ""


def in_words(error: Exception) -> str:
    """What went wrong: of what the system refused, which file it is about and what to do."""
    if isinstance(error, OSError) and error.filename is not None and error.errno is not None:
        return f"{error.filename}: {_REFUSALS.get(error.errno, error.strerror)}"
    return str(error)


def strangers(
    words: Sequence[str],
    known: Iterable[str],
    elsewhere: Mapping[str, type[msgspec.Struct]],
    program: str,
) -> Iterator[str]:
    """A line for each flag that a command does not know; what follows one is taken for its value.

    `known`: names of settings. `elsewhere`: settings that have no flag here, by their section of the file.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        yield f"{words[0]}: nothing is expected there; {program} --help shows what is"
    names = ["--" + name.replace("_", "-") for name in known]
    for flag in flags:
        name = flag.lstrip("-").replace("-", "_")
        sections = [each for each, kind in elsewhere.items() if name in kind.__struct_encode_fields__]
        if sections:
            way = f"set ROUNDHOUSE_{name.upper()}, or {name} under [{sections[0]}] in the file"
            yield f"{flag}: no flag of this command; {way}"
        else:
            yield f"{flag}: no such flag{meant(flag, names) or f'; {program} --help shows all, {_OTHERS}'}"
