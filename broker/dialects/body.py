"""Request bodies: decoding into typed structs, and msgspec's errors in terms of the client's fields.

A limit of a field is in its type, as `Meta`: msgspec checks it, and the OpenAPI document repeats it. What
msgspec cannot check is there as `extra_schema`, for the document alone, and a function checks it. Fields that
a type does not have are ignored; those that are known but not supported are refused (`refuse`).
"""

from __future__ import annotations

import itertools
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect
from msgspec.inspect import DictType, FloatType, IntType, ListType, Metadata, StructType, Type, UnionType

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


# Coercion of a decoded JSON body to its type: null means absent, and an integer may be written `426.0`.
# msgspec takes null only where a type names it, and floats never as integers; its lax mode would accept
# strings as numbers too. So a body that it refuses for either is walked along its type, and decoded again.
# Values whose type is open are data, and stay as they are: arguments of a tool call, JSON Schemas, options of
# a template.

EXACT_MAX = 2**53
"""Beyond this, a float may differ from the number in the body."""

_CAUSES = ("got `null`", "got `float`", "Expected `str` - at")
"""The last one is what msgspec says of a null in place of an object's tag."""
_type_of = cache(inspect.type_info)


def is_curable(error: msgspec.ValidationError) -> bool:
    """Return whether msgspec refused a value that `coerce` may change."""
    return any(cause in str(error) for cause in _CAUSES)


def coerce(value: Any, kind: Any) -> Any:
    """Return the value for the Python type `kind`, without nulls for absent fields and entries, and with
    integers for integral floats.

    Elements of an array have no name that could be absent, so their nulls stay, to be refused.
    """
    return _coerced(value, _type_of(kind))


def _coerced(value: Any, kind: Type) -> Any:
    match kind:
        case Metadata():
            return _coerced(value, kind.type)
        case StructType() if isinstance(value, dict):
            return _coerced_struct(value, kind)
        case ListType() if isinstance(value, list):
            return [_coerced(item, kind.item_type) for item in value]
        case DictType() if isinstance(value, dict):
            return _coerced_entries(value, dict.fromkeys(value, kind.value_type))
        case UnionType():
            return _coerced(value, _member(value, kind)) if value is not None else None
        case IntType() if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
            return int(value)
    return value


def _coerced_struct(value: dict[str, Any], kind: StructType) -> dict[str, Any]:
    entries = {field.encode_name: field.type for field in kind.fields}
    if kind.tag_field is not None:
        entries[kind.tag_field] = inspect.StrType()
    return _coerced_entries(value, entries)


def _coerced_entries(value: dict[str, Any], kinds: dict[str, Type]) -> dict[str, Any]:
    changed = dict(value)
    for name, kind in kinds.items():
        if name not in changed:
            continue
        if changed[name] is None and not _takes_null(kind):
            del changed[name]
        else:
            changed[name] = _coerced(changed[name], kind)
    return changed


def _takes_null(kind: Type) -> bool:
    match kind:
        case Metadata():
            return _takes_null(kind.type)
        case UnionType():
            return any(map(_takes_null, kind.types))
        case inspect.LiteralType():
            return None in kind.values
        case _:
            return isinstance(kind, inspect.AnyType | inspect.RawType | inspect.NoneType)


def _member(value: Any, union: UnionType) -> Type:
    """Return the member of a union that a value belongs to: of tagged objects, the one with its tag."""
    kinds = [kind.type if isinstance(kind, Metadata) else kind for kind in union.types]
    match value:
        case dict():
            objects = [kind for kind in kinds if isinstance(kind, StructType | DictType)]
            tagged = [kind for kind in objects if isinstance(kind, StructType) and kind.tag_field]
            of_tag = [kind for kind in tagged if value.get(kind.tag_field) in (kind.tag, None)]
            return next(iter(of_tag if tagged else objects), inspect.AnyType())
        case list():
            return next((kind for kind in kinds if isinstance(kind, ListType)), inspect.AnyType())
        case float() if not any(isinstance(kind, FloatType) for kind in kinds):
            return next((kind for kind in kinds if isinstance(kind, IntType)), inspect.AnyType())
        case _:
            return inspect.AnyType()


# --- Size of a JSON body in values, keys, containers and depth, measured before it is decoded --------
#
# Decoding makes an object of each of them, and holds the interpreter lock meanwhile: a body of millions would
# stop all streams for seconds, whichever thread decodes it. Counting bytes takes milliseconds.

VALUES_MAX = 2**20
"""Maximum number of values that are separated by commas: a prompt of a million tokens."""
KEYS_MAX = 2**18
CONTAINERS_MAX = 2**17
"""Fewer, because garbage collection visits each of them: ten thousand tools, or messages with parts."""
DEPTH_MAX = 256
"""Decoders have limits of their own, between 1,000 levels (Python 3.11) and what the stack takes (3.14)."""

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
"""A string, or the unterminated one at the end of a body that is not JSON."""
_STRINGS = re.compile(_STRING, re.DOTALL)
_RUNS = re.compile(rb'(?:[^"]*+' + _STRING + rb"){1,4096}", re.DOTALL)
"""Strings with what is before each, not too many at once: a match holds the interpreter lock."""
_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_TEXT = bytes(set(range(256)) - {*_LEVELS, ord('"')})


def is_too_deep(document: bytes) -> bool:
    """Return whether a JSON document nests containers deeper than `DEPTH_MAX`."""
    if document.count(b"[") + document.count(b"{") <= DEPTH_MAX:
        return False
    # Without escapes and text, what is left of most bodies is short.
    quoted = document.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _TEXT)
    brackets = itertools.chain.from_iterable(_outside_strings(quoted))
    levels = itertools.accumulate(map(_LEVELS.__getitem__, brackets))
    return any(map(DEPTH_MAX.__lt__, levels))


def check_size(body: bytes) -> None:
    """Raise `RequestError(request_too_large)` if a JSON body has more of anything than its maximum."""
    # Most bodies need no more than this: text has few of these characters.
    if len(body) <= CONTAINERS_MAX or _excess(_count(body)) is None:
        return
    counts = [0, 0, 0]
    for text in _outside_strings(body):
        counts = [before + more for before, more in zip(counts, _count(text), strict=True)]
        if (excess := _excess(counts)) is not None:
            raise RequestError(Code.REQUEST_TOO_LARGE, f"The request body has more than {excess}.")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield a body without its strings, in pieces."""
    end = 0
    while run := _RUNS.match(body, end):
        end = run.end()
        yield _STRINGS.sub(b"", run[0])
    yield body[end:]


def _count(text: bytes) -> list[int]:
    """Count the containers, the keys, and the commas, which separate values."""
    return [text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b",")]


def _excess(counts: list[int]) -> str | None:
    """Return the maximum that is exceeded, with its name."""
    maxima = (CONTAINERS_MAX, KEYS_MAX, VALUES_MAX)
    names = ("JSON arrays and objects", "JSON keys", "JSON values")
    for count, most, name in zip(counts, maxima, names, strict=True):
        if count > most:
            return f"{most} {name}"
    return None
