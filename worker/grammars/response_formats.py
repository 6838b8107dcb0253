"""Grammars of response formats, and the compilation of JSON schemas that may be relaxed.

`worker.grammars.schema` drops what it knows to be unenforceable, and llguidance is lenient: it ignores, with
a warning, keywords that it does not implement. What it still refuses is dropped wherever it occurs, one
keyword after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec
from llguidance import LLMatcher, regex_to_lark

from protocol.types import StructuredOutput
from worker.grammars import lark, schema
from worker.grammars.compiler import GrammarError
from worker.grammars.references import Schema, SchemaError
from worker.grammars.schema import OPTION_TYPES, REFERENCE_SIBLINGS, Relaxation

CHOICES_MAX = 10_000
TEXT_BYTES_MAX = schema.SCHEMA_BYTES_MAX
_CHOICES = msgspec.json.Decoder(list[str])
_OBJECT: Schema = {"type": "object"}

_REASONS = {
    "min/maxProperties": ("maxProperties", "minProperties"),
    "greater than number of properties": ("maxProperties", "minProperties"),
    "patternProperty": ("patternProperties",),
    "regex": ("pattern", "patternProperties"),
    "Regex": ("pattern", "patternProperties"),
    "circular": (OPTION_TYPES, REFERENCE_SIBLINGS, "patternProperties", "allOf"),
}
"""What llguidance says, and the keywords to drop for it, in order."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_ONE_OF = "oneOf not fully supported"

Compile = Callable[[str], LLMatcher]


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


def compile_relaxed(
    write: Callable[[Relaxation], str], compile: Compile
) -> tuple[LLMatcher, tuple[str, ...]]:
    """Compile the grammar that `write` returns for a relaxation of its schemas, and return the keywords that
    are not enforced everywhere.

    Raises `SchemaError` or `GrammarError` for what no relaxation makes enforceable: a schema that is
    malformed, too large, or without any valid value.
    """
    dropped: list[str] = []
    while True:  # ends, because `dropped` grows and is finite
        relaxation = Relaxation(frozenset(dropped))
        try:
            matcher = compile(write(relaxation))
            warnings = matcher.deep_copy().get_grammar_warnings()
            more = _to_drop(warnings, dropped)
        except SchemaError as error:
            more = [error.keyword] if error.keyword and error.keyword not in dropped else []
            if not more:
                raise
        except GrammarError as error:
            more = _to_drop([str(error)], dropped)
            if not more:
                raise
        if not more:
            return matcher, tuple(sorted(relaxation.keywords.union(_ignored(warnings))))
        dropped += more


def _to_drop(messages: Iterable[str], dropped: list[str]) -> list[str]:
    """Return the keyword to drop because of llguidance's messages, if any is left."""
    said = "\n".join(messages)
    keywords = (key for reason, keywords in _REASONS.items() if reason in said for key in keywords)
    return [key for key in keywords if key not in dropped][:1]


def _ignored(warnings: Iterable[str]) -> Iterator[str]:
    """Return the keywords that llguidance ignores: `oneOf` as `anyOf`, all others entirely."""
    for warning in warnings:
        if _ONE_OF in warning:
            yield "oneOf"
        for found in _UNIMPLEMENTED.finditer(warning):
            yield from json.loads(found[1])
