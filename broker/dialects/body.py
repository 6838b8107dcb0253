"""Request bodies: decoding into typed structs, and msgspec's errors in terms of the client's fields.

A limit of a field is in its type, as `Meta`: msgspec checks it, and the OpenAPI document repeats it. What
msgspec cannot check is there as `extra_schema`, for the document alone, and a function checks it.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from broker.dialects.coercion import coerce, is_curable
from broker.dialects.json_size import check_size, is_too_deep
from protocol.errors import Code, RequestError

T = TypeVar("T")

SCHEMA_REF = "#/components/schemas/{name}"
"""Reference to a schema of the OpenAPI document."""


def extra_schema(**keywords: Any) -> Meta:
    """Return JSON Schema of a field for the OpenAPI document, which msgspec does not check."""
    return Meta(extra_json_schema=keywords)


def refer(name: str) -> dict[str, str]:
    """Return the JSON Schema of what has a schema of its own: a type, also one that is decoded later."""
    return {"$ref": SCHEMA_REF.format(name=name)}


PositiveInt = Annotated[int, Meta(ge=1, le=2**31)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]
MetadataPairs = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
UnsupportedField = Annotated[Any, extra_schema(type="null")]
"""A field that is known, and refused if a client sets it (see `refuse`)."""

_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_LIMIT = re.compile(
    r"Expected `(?P<kind>\w+)`(?P<length> of length)? (?P<how>[<>]=?|matching regex) (?P<bound>.+)"
)
_HOW = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}
_UNITS = {"array": "items", "object": "entries", "str": "characters"}
_ENTRY = "[...]"


def decode(decoder: msgspec.json.Decoder[T], body: bytes, *, is_sized: bool = True) -> T:
    """Decode a body. Raises `RequestError(invalid_request)` naming the field at fault, if there is one, or
    `request_too_large`. `is_sized`: whether the number of its values is limited, as always unless its
    parts are `Raw`."""
    if is_sized:
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
    if limit := _LIMIT.fullmatch(reason):
        of = "A key of " if place and place["key"] else "A value of " if path.endswith(_ENTRY) else ""
        path = path.removesuffix(_ENTRY)
        return RequestError(Code.INVALID_REQUEST, f"{of}'{path}' {_worded(limit)}.", param=path or None)
    if missing := _MISSING.search(reason):
        return wrong(_path(path, missing["name"]), "is required")
    where = f"'{path}': " if path else ""
    return RequestError(Code.INVALID_REQUEST, f"{where}{reason}.", param=path or None)


def _path(within: str, path: str) -> str:
    dot = "." if within and path and not path.startswith("[") else ""
    return f"{within}{dot}{path}"


def _worded(limit: re.Match[str]) -> str:
    """Return a limit in the one wording for all of them."""
    how, bound = limit["how"], limit["bound"].removesuffix(".0")
    if how not in _HOW:
        return f"must match {bound}"
    if not limit["length"]:
        return f"must be {_HOW[how]} {bound}"
    if (how, bound) == (">=", "1"):
        return "must not be empty"
    return f"must have {_HOW[how]} {bound} {_UNITS[limit['kind']]}"


def wrong(param: str, why: str) -> RequestError:
    """Make the error for a parameter with a value that is not allowed."""
    return RequestError(Code.INVALID_REQUEST, f"'{param}' {why}.", param=param)


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
