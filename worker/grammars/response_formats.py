"""Grammars of response formats. Pure."""

from __future__ import annotations

import msgspec
from llguidance import regex_to_lark

from protocol.types import StructuredOutput
from worker.grammars import lark, schema
from worker.grammars.references import Schema, SchemaError
from worker.grammars.schema import Relaxation

CHOICES_MAX = 10_000
TEXT_BYTES_MAX = schema.SCHEMA_BYTES_MAX
_CHOICES = msgspec.json.Decoder(list[str])
_OBJECT: Schema = {"type": "object"}


class ResponseFormatError(SchemaError):
    """A response format is not supported. The message is a sentence without its subject."""


def grammar_of(form: StructuredOutput, relaxation: Relaxation | None = None) -> str:
    """Return the grammar of a response format. `relaxation`: how its schema may be relaxed; None: not at all.

    Raises `ResponseFormatError` if it is malformed.
    """
    if len(form.text) > TEXT_BYTES_MAX:
        raise ResponseFormatError(f"is {len(form.text)} characters long; the limit is {TEXT_BYTES_MAX}")
    match form.kind:
        case "json_object":
            return lark.grammar(lark.value(_OBJECT))
        case "json_schema":
            parsed = _parsed(form.text, relaxation)
            return lark.grammar(lark.value(parsed, lenient=relaxation is not None))
        case "regex":
            return lark.grammar("CONTENT", f"CONTENT: {lark.regex(_unanchored(form.text))}")
        case "choice":
            return lark.grammar("CONTENT", f"CONTENT: {_choices(form.text)}")
        case "lark":
            return lark.HEAD + form.text
    raise ResponseFormatError(f"is of the unknown kind {form.kind!r}")


def is_json(form: StructuredOutput) -> bool:
    """Whether the format is JSON, so that white space before it is not content."""
    return form.kind in ("json_object", "json_schema")


def _parsed(text: str, relaxation: Relaxation | None) -> Schema:
    try:
        return schema.parse(text.encode(), relaxation)
    except SchemaError as error:
        raise ResponseFormatError(str(error), error.keyword) from None
    except UnicodeEncodeError:
        raise ResponseFormatError("is not valid Unicode text") from None


def _unanchored(pattern: str) -> str:
    """Drop the anchors of a pattern: the whole content is matched, and llguidance has no anchors. `\\d` means
    ASCII digits."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escapes = len(body) - len(body.rstrip("\\"))
    return regex_to_lark(pattern if escapes % 2 else body, "d").replace("\n", r"\n")


def _choices(text: str) -> str:
    try:
        choices = _CHOICES.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ResponseFormatError(f"is not a list of strings: {error}") from None
    if not 0 < len(choices) <= CHOICES_MAX:
        raise ResponseFormatError(f"has {len(choices)} choices; 1 to {CHOICES_MAX} are allowed")
    return " | ".join(map(lark.literal, dict.fromkeys(choices)))
