"""Request bodies: decoding into typed structs, and msgspec's errors in terms of the client's fields."""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from typing import Any, TypeVar

import msgspec

from broker.dialects.coercion import coerce, is_curable
from broker.dialects.json_size import check_size, is_too_deep
from protocol.errors import Code, RequestError

T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body. Raises `RequestError(invalid_request)` naming the field at fault, if there is one, or
    `request_too_large`."""
    check_size(body)
    if is_too_deep(body):
        raise RequestError(Code.INVALID_REQUEST, "The body is nested too deeply.")
    try:
        return _read(decoder, body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            Code.INVALID_REQUEST, f"The body is not valid JSON: {_why(body, error)}."
        ) from None


def _why(body: bytes, error: Exception) -> str:
    if body.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in body[:4]:
        return "it is UTF-16 or UTF-32, and must be UTF-8"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not is_curable(error):
            raise
    document = coerce(msgspec.json.decode(body), decoder.type)
    return decoder.decode(msgspec.json.encode(document))


def convert(value: Any, kind: type[T], place: str) -> T:
    """Convert the part of a body at `place` to `kind`. Raises like `decode`."""
    try:
        return _convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), place) from None


def _convert(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if not is_curable(error):
            raise
    return msgspec.convert(coerce(value, kind), kind)


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
    """Raise `RequestError` unless `low` <= `value` <= `high`; None passes."""
    if value is not None and not low <= value <= high:
        # Not formatted as a float: an integer may be too large for one.
        given = str(value)[:32]
        raise RequestError(
            Code.INVALID_REQUEST, f"'{name}' must be between {low} and {high}, not {given}.", param=name
        )


def refuse(name: str, why: str) -> RequestError:
    """Make the error for a parameter that is known but not supported. Such parameters are never ignored."""
    return RequestError(Code.UNSUPPORTED_PARAMETER, f"'{name}' {why}.", param=name)


def encode_text(text: str) -> bytes:
    """Encode a JSON string. Text from a tokenizer has no lone surrogates, so this does not fail."""
    return _encoder.encode(text) if text.isascii() else _escape_line_ends(_encoder.encode(text))


def encode(document: Any) -> bytes:
    """Encode a JSON document."""
    return _escape_line_ends(_encoder.encode(document))


def _escape_line_ends(encoded: bytes) -> bytes:
    """Escape NEL, LS and PS, which are legal in JSON, but which many clients take for the end of a line."""
    # A single byte is found several times faster than three, and few scripts have these two.
    if b"\xc2" in encoded:
        encoded = encoded.replace(b"\xc2\x85", rb"\u0085")
    if b"\xe2" in encoded:
        encoded = encoded.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    return encoded


_encoder = msgspec.json.Encoder()
