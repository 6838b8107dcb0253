"""Error texts for people: misspelt and removed names, system errors, unknown flags."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

_ALIKE_MIN = 0.7
"""Minimum similarity (0 to 1) of a name that is suggested."""

_OTHERS = "other settings are environment variables or keys of the file (docs/operating.md)"

REMOVED = {
    "max_kv_size": "--kv-bits takes less memory for each token of a request",
    "burst_wait_max": "requests that arrive together start as soon as each prompt has run",
    "quantized_kv_start": "--kv-bits quantizes from the first token on",
}
"""Settings of earlier versions, each with what to use instead."""

FOREIGN = {
    **dict.fromkeys(("max_model_len", "num_ctx"), "nothing: the context is what fits into the memory"),
    **dict.fromkeys(("max_num_seqs", "decode_concurrency"), "--max-running"),
    "max_num_batched_tokens": "nothing: chosen by what the machine does in time",
    "gpu_memory_utilization": "--memory-budget",
    "served_model_name": "--model NAME=MODEL",
    **dict.fromkeys(("enable_prefix_caching", "enable_auto_tool_choice"), "nothing: it is on"),
    "prompt_cache_size": "--prefix-cache-ram",
    "quantization": "a model that is quantized, such as those of mlx-community in 4 bits",
    **dict.fromkeys(("enable_lora", "lora_modules", "adapter_path"), "--adapter NAME=FOLDER"),
    "tensor_parallel_size": "--hosts, for several machines",
    "data_parallel_size": "--replicas",
    **dict.fromkeys(("speculative_config", "speculative_model"), "--speculation, --draft-model"),
    "keep_alive": "--unload-after, with several models",
}
"""Settings of other servers, each with what does the same here."""

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


def setting_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint to append to the name or flag of an unknown setting: what replaces a removed or another
    server's one, or which one may be meant."""
    plain = name.removeprefix("--").replace("-", "_")
    if instead := REMOVED.get(plain):
        return f"; it was removed: {instead}"
    if instead := FOREIGN.get(plain):
        return f"; another server's, here {instead}"
    return closest_match(name, known)


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
    own = ["--" + name.replace("_", "-") for name in known]
    others = {flag: name for flag, name in _flags_elsewhere(elsewhere).items() if flag not in own}
    for flag in flags:
        if flag in others:
            yield f"{flag}: not a flag of this command; {_way_in(others[flag], elsewhere)}"
            continue
        # Among all settings: a misspelt one of another process may also look like one of ours.
        hint = setting_hint(flag, [*own, *others])
        meant = hint.removeprefix("; did you mean ").removesuffix("?")
        if meant in others:
            hint = f"; did you mean the setting {others[meant]}? If so, {_way_in(others[meant], elsewhere)}"
        yield f"{flag}: no such flag{hint or f'; see {program} --help; {_OTHERS}'}"


def _flags_elsewhere(elsewhere: Mapping[str, type[msgspec.Struct]]) -> dict[str, str]:
    """Return the settings of `elsewhere` by the forms that their flags have in their own process."""
    names = [name for kind in elsewhere.values() for name in kind.__struct_encode_fields__]
    flags = {"--" + name.replace("_", "-"): name for name in names}
    negated = {"--no-" + flag[2:]: name for flag, name in flags.items()}
    singular = {flag.removesuffix("s"): name for flag, name in flags.items()}
    return negated | singular | flags


def _way_in(name: str, elsewhere: Mapping[str, type[msgspec.Struct]]) -> str:
    sections = [f"[{each}]" for each, kind in elsewhere.items() if name in kind.__struct_encode_fields__]
    return f"set ROUNDHOUSE_{name.upper()}, or {name} under {' or '.join(sections)} in the file"


def in_bytes(count: int) -> str:
    """Format an amount of memory."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
