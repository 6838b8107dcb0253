"""Request bodies: bytes -> typed structs, and what msgspec says of a wrong one in the client's own terms."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from broker.dialects import integers
from protocol.errors import Code, RequestError

T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises `RequestError(invalid_request)` that names the field at fault, where there is one."""
    try:
        return _read(decoder, body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(Code.INVALID_REQUEST, f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise RequestError(Code.INVALID_REQUEST, "The body is nested too deeply.") from None


def _read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        refused = error
    read: T = integers.decoded(decoder, body, refused)
    return read


def convert(value: Any, kind: type[T], place: str) -> T:
    """A part of a body, which stands at `place` in it, as what it should be. Raises as `decode` does."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), place) from None


def _invalid(text: str, within: str = "") -> RequestError:
    place = _PLACE.search(text)
    path = _path(within, place["path"] if place else "")
    reason = _PLACE.sub("", text)
    if missing := _MISSING.search(reason):
        path = _path(path, missing["name"])
    where = f"'{path}': " if path else ""
    return RequestError(Code.INVALID_REQUEST, f"{where}{reason}.", param=path or None)


def _path(within: str, path: str) -> str:
    dot = "." if within and path and not path.startswith("[") else ""
    return f"{within}{dot}{path}"


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raises unless `low` <= value <= `high`; None passes."""
    if value is not None and not low <= value <= high:
        # Not as a float: an integer may be too large to become one.
        given = str(value)[:32]
        raise RequestError(
            Code.INVALID_REQUEST, f"'{name}' must be between {low} and {high}, not {given}.", param=name
        )


def refuse(name: str, why: str) -> RequestError:
    """A parameter that is understood and not served: said plainly, never ignored."""
    return RequestError(Code.UNSUPPORTED_PARAMETER, f"'{name}' {why}.", param=name)


def encode_text(text: str) -> bytes:
    """A JSON string. Text from a tokenizer can't hold lone surrogates, so this does not fail."""
    return _encoder.encode(text)


def encode(document: Any) -> bytes:
    """A JSON document."""
    return _encoder.encode(document)


_encoder = msgspec.json.Encoder()
