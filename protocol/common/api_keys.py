"""API keys, and the file that holds them: plain or hashed, one per line.

    # a comment
    KEY [NAME]
    sha256:DIGEST [max-concurrent=N] [NAME]

`roundhouse keys` writes the second form. Its keys are 256 random bits, so a plain SHA-256 suffices: salt and
slow hashes protect secrets that can be guessed, and each request would pay for them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address

HASHED = "sha256:"
KEY_PREFIX = "rh-"
"""By which people and secret scanners recognize a key."""
KEY_BYTES = 32
NAME_CHARS_MAX = 64

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONCURRENT = "max-concurrent="
_ID_CHARS = 8


class KeysError(ValueError):
    """Raised for invalid API keys; the message does not contain them."""


def check_exposure(hosts: Iterable[str]) -> None:
    """Raise `KeysError` if other machines can connect to one of the numeric addresses, where no API key is
    required."""
    if exposed := [host for host in hosts if not ip_address(host).is_loopback]:
        raise KeysError(
            f"{exposed[0]} is reachable from other machines and there are no API keys: set --api-keys-file "
            "(or ROUNDHOUSE_API_KEYS), listen on 127.0.0.1, or pass --insecure-no-keys"
        )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A valid API key. `name`: its owner's name in the log. `is_named`: the operator chose the name.

    `concurrent_max`: limit of its requests in flight; None for the server's default.
    """

    digest: bytes = field(repr=False)
    name: str
    is_named: bool = True
    concurrent_max: int | None = None

    @classmethod
    def of(cls, text: str, name: str, where: str, *, is_named: bool = True) -> ApiKey:
        """Hash a key. Raises `KeysError`, whose message begins with `where`."""
        if not text or not all("!" <= letter <= "~" and letter != "," for letter in text):
            raise KeysError(f"{where}: a key must be one word of printable ASCII characters without commas")
        return cls(hashlib.sha256(text.encode("ascii")).digest(), name, is_named)

    @property
    def id(self) -> str:
        """Public name that distinguishes keys of one owner; the key cannot be computed from it."""
        return self.digest.hex()[:_ID_CHARS]

    @property
    def line(self) -> str:
        """The line of the file that holds it, without the key itself."""
        limit = [] if self.concurrent_max is None else [f"{_CONCURRENT}{self.concurrent_max}"]
        return " ".join([HASHED + self.digest.hex(), *limit, *([self.name] if self.is_named else [])])

    @property
    def prefix_namespace(self) -> str:
        """Namespace of its prefixes in the prefix cache, which is the same after a restart.

        Keys of one name are one owner's, so that a new key finds the prefixes of the one that it replaces.
        Workers write it to files, from which neither the key nor its digest can be computed.
        """
        by, owner = (b"name", self.name.encode()) if self.is_named else (b"key", self.digest)
        return hashlib.blake2b(owner, digest_size=16, person=b"prefixes by " + by).hexdigest()


def parse(content: bytes, source: str) -> tuple[ApiKey, ...]:
    """Parse a key file. Raises `KeysError`."""
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(lines_of(content, source), 1):
        key = parse_line(line, number, source)
        if key is not None and key.digest in keys:
            raise KeysError(f"{source}, line {number}: duplicate key")
        if key is not None:
            keys[key.digest] = key
    if not keys:
        raise KeysError(f"{source} contains no key")
    return tuple(keys.values())


def lines_of(content: bytes, source: str) -> list[str]:
    """Return the lines of a key file. Raises `KeysError`."""
    try:
        return content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise KeysError(f"{source} is not UTF-8 text") from error


def parse_line(line: str, number: int, source: str) -> ApiKey | None:
    """Parse a line; None if it is empty or a comment. Raises `KeysError`."""
    words = line.split(None, 1)
    if not words or words[0].startswith("#"):
        return None
    where, rest = f"{source}, line {number}", words[1].strip() if len(words) == 2 else ""
    if not words[0].startswith(HASHED):
        return ApiKey.of(words[0], rest or f"line {number}", where, is_named=bool(rest))
    digest = words[0].removeprefix(HASHED)
    if not _DIGEST.fullmatch(digest):
        raise KeysError(f"{where}: {HASHED} must be followed by 64 hexadecimal digits in lower case")
    limit, _, name = rest.partition(" ") if "=" in rest.partition(" ")[0] else ("", "", rest)
    concurrent_max = _concurrent_max(limit, where) if limit else None
    name = name.strip()
    return ApiKey(bytes.fromhex(digest), name or f"line {number}", bool(name), concurrent_max)


def _concurrent_max(option: str, where: str) -> int:
    count = option.removeprefix(_CONCURRENT)
    if not option.startswith(_CONCURRENT) or not re.fullmatch(r"[1-9][0-9]{0,8}", count):
        raise KeysError(f"{where}: the only option is {_CONCURRENT}N, with N of at least 1")
    return int(count)


def plain_keys(content: bytes) -> list[str]:
    """Return the keys that a file holds in plain text, for clients on this machine."""
    found = [line.split(None, 1) for line in content.decode("utf-8-sig", "replace").split("\n")]
    return [words[0] for words in found if words and not words[0].startswith(("#", HASHED))]


# --- changes -----------------------------------------------------------------------------------------


def create(name: str, concurrent_max: int | None) -> tuple[str, ApiKey]:
    """Return a new random key, and what is stored of it. Raises `KeysError` for a name no file can hold."""
    is_word = " ".join(name.split()) == name and name.isprintable() and len(name) <= NAME_CHARS_MAX
    if not name or not is_word or "=" in name.partition(" ")[0]:
        raise KeysError(
            f"{name!r}: a name has 1 to {NAME_CHARS_MAX} printable characters; no = in its first word"
        )
    text = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return text, ApiKey(hashlib.sha256(text.encode()).digest(), name, True, concurrent_max)


def without(content: bytes, which: str, source: str) -> tuple[bytes, list[ApiKey]]:
    """Return the file without the keys of this name or id, and these keys. Other lines do not change.

    Raises `KeysError` if there is no such key, or no other one.
    """
    kept_lines, removed, others = [], [], []
    for number, line in enumerate(lines_of(content, source), 1):
        key = parse_line(line, number, source)
        if key is not None and which in (key.name, key.id):
            removed.append(key)
            continue
        kept_lines.append(line)
        others += [key] if key is not None else []
    if not removed:
        raise KeysError(f"{source} has no key {which}; see roundhouse keys list")
    if not others:
        # The gateway takes a file without keys for an editing mistake, and keeps those that it has.
        raise KeysError(
            f"{which} is the only key in {source}: create another one first, then revoke this one;"
            " or stop the server, and delete the file"
        )
    return "\n".join(kept_lines).encode(), removed
