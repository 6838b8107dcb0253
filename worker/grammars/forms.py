"""A request's form as a grammar. Pure."""

from __future__ import annotations

import msgspec
from llguidance import regex_to_lark

from protocol.parts import Form
from worker.grammars import lark, schema

CHOICES_MAX = 10_000
TEXT_BYTES_MAX = schema.SCHEMA_BYTES_MAX
_CHOICES = msgspec.json.Decoder(list[str])
_OBJECT: schema.Schema = {"type": "object"}


class FormError(Exception):
    """Why a form cannot be held to; a sentence without its subject."""


def grammar_of(form: Form) -> str:
    """The grammar of all contents of this form. Raises `FormError` for one that is malformed."""
    if len(form.text) > TEXT_BYTES_MAX:
        raise FormError(f"is {len(form.text)} characters long, and may be {TEXT_BYTES_MAX}")
    match form.kind:
        case "json_object":
            return lark.grammar(lark.value(_OBJECT))
        case "json_schema":
            return lark.grammar(lark.value(_parsed(form.text)))
        case "regex":
            return lark.grammar("CONTENT", f"CONTENT: {lark.regex(_unanchored(form.text))}")
        case "choice":
            return lark.grammar("CONTENT", f"CONTENT: {_choices(form.text)}")
        case "lark":
            return lark.HEAD + form.text
    raise FormError(f"is of a kind that is not known here: {form.kind!r}")


def is_json(form: Form) -> bool:
    """Whether white space before the content is none of it."""
    return form.kind in ("json_object", "json_schema")


def _parsed(text: str) -> schema.Schema:
    try:
        return schema.parse(text.encode())
    except schema.SchemaError as error:
        raise FormError(str(error)) from None
    except UnicodeEncodeError:
        raise FormError("is no text") from None


def _unanchored(pattern: str) -> str:
    """The whole content is matched anyway; llguidance knows no anchors. Digits are ASCII's."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escapes = len(body) - len(body.rstrip("\\"))
    return regex_to_lark(pattern if escapes % 2 else body, "d").replace("\n", r"\n")


def _choices(text: str) -> str:
    try:
        choices = _CHOICES.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormError(f"is no list of strings: {error}") from None
    if not 0 < len(choices) <= CHOICES_MAX:
        raise FormError(f"has {len(choices)} choices, and may have 1 to {CHOICES_MAX}")
    return " | ".join(map(lark.literal, dict.fromkeys(choices)))
