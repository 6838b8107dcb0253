"""Structured-output parameters of a body -> `StructuredOutput`.

Reads OpenAI's `response_format`, vLLM's `structured_outputs`, its earlier `guided_*`, and llama.cpp's and
SGLang's `json_schema`. Only the shape is checked here; the worker compiles schemas and grammars. A schema
stays text while its request waits, because parsed it takes up to thirty times the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field

from broker.dialects.body import (
    NonEmptyStr,
    UnsupportedField,
    encode,
    extra_schema,
    is_too_deep,
    refuse,
    wrong,
)
from broker.dialects.parameters import Parameters
from broker.dialects.reasoning import FalseOnly
from protocol.types import StructuredOutput

_ABSENT = (b"", b"null")

_object: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_string: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)

RawSchema = Annotated[Raw, extra_schema(type="object")]
RawSchemaOrText = Annotated[Raw, extra_schema(type=["object", "string"])]
Options = Annotated[list[str], Meta(min_length=1)]
Whitespace = Annotated[str, extra_schema(maxLength=0)]

_TAGS = "is not supported: tags in the middle of a text cannot be enforced"
_IN_SCHEMA = "is not supported: express it in the schema, or leave it to the model"
FOREIGN = {
    "grammar": "is not supported: use 'json_schema', or 'structured_outputs.grammar' in Lark's notation",
    "ebnf": "is not supported: use 'structured_outputs.grammar', in Lark's notation",
    "regex": "is not supported: use 'structured_outputs.regex'",
    "format": "is not supported: use 'response_format'",
    "structural_tag": _TAGS,
    "guided_whitespace_pattern": _IN_SCHEMA,
}
"""Parameters of other servers that would constrain the answer, and what to use instead."""
_UNSUPPORTED_OPTIONS = {
    "structural_tag": _TAGS,
    **dict.fromkeys(
        ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"), _IN_SCHEMA
    ),
}


class JsonSchema(Struct):
    """A named schema. Unless `strict`, what cannot be enforced is relaxed. `name` has no effect."""

    schema: RawSchema = field(default_factory=Raw)
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """OpenAI's `response_format`. llama.cpp and others also accept `schema` with type `json_object`.

    `strict` may stand here as well.
    """

    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"],
        extra_schema(**{"not": {"const": "structural_tag"}}),
    ]
    json_schema: JsonSchema | None = None
    schema: RawSchema = field(default_factory=Raw)
    strict: bool | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: one of the first six fields, with options."""

    json: RawSchemaOrText = field(default_factory=Raw)
    regex: NonEmptyStr | None = None
    choice: Options | None = None
    grammar: NonEmptyStr | None = None
    json_object: bool | None = None
    structural_tag: UnsupportedField = None
    whitespace_pattern: Whitespace | None = None
    disable_any_whitespace: FalseOnly | None = None
    disable_additional_properties: FalseOnly | None = None


class FormParameters(Parameters, kw_only=True):
    """Body fields of the dialects with structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: RawSchemaOrText = field(default_factory=Raw)
    guided_regex: NonEmptyStr | None = None
    guided_choice: Options | None = None
    guided_grammar: NonEmptyStr | None = None
    guided_whitespace_pattern: Whitespace | None = None
    structural_tag: UnsupportedField = None
    json_schema: RawSchemaOrText = field(default_factory=Raw)
    grammar: UnsupportedField = None
    ebnf: UnsupportedField = None
    regex: UnsupportedField = None
    format: UnsupportedField = None


def form_of(body: FormParameters) -> StructuredOutput | None:
    """Return the requested structured output, if any. Raises `RequestError` naming the parameter at fault."""
    _refuse_unserved(body)
    forms = [
        *_openai(body.response_format),
        *_vllm(body.structured_outputs),
        *_guided(body),
        *_llama(body.json_schema),
    ]
    if len(forms) > 1:
        raise wrong(forms[1].param, f"cannot be combined with '{forms[0].param}'")
    return forms[0] if forms else None


def _refuse_unserved(body: FormParameters) -> None:
    for name, why in FOREIGN.items():
        if getattr(body, name):
            raise refuse(name, why)
    for name, why in _UNSUPPORTED_OPTIONS.items():
        if getattr(body.structured_outputs, name, None):
            raise refuse(f"structured_outputs.{name}", why)
    if body.response_format is not None and body.response_format.type == "structural_tag":
        raise refuse("response_format.type", "must be 'text', 'json_object' or 'json_schema'")


def _openai(wanted: ResponseFormat | None) -> Iterator[StructuredOutput]:
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_object" and not _is_given(wanted.schema):
        yield StructuredOutput(kind="json_object", param="response_format")
        return
    place, schema, strict = "response_format.schema", wanted.schema, bool(wanted.strict)
    if wanted.type == "json_schema" and (wanted.json_schema is not None or not _is_given(schema)):
        described = wanted.json_schema or JsonSchema()
        place, schema = "response_format.json_schema.schema", described.schema
        strict = strict or bool(described.strict)
    yield StructuredOutput(kind="json_schema", text=schema_text(place, schema), param=place, strict=strict)


def _llama(schema: Raw) -> Iterator[StructuredOutput]:
    if _is_given(schema):
        text = schema_text("json_schema", schema, or_text=True)
        yield StructuredOutput(kind="json_schema", text=text, param="json_schema", strict=False)


def _vllm(outputs: StructuredOutputs | None) -> Iterator[StructuredOutput]:
    if outputs is None:
        return
    yield from _texts("structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar)
    if outputs.json_object:
        yield StructuredOutput(kind="json_object", param="structured_outputs.json_object")


def _guided(body: FormParameters) -> Iterator[StructuredOutput]:
    given = body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    yield from _texts("guided_", *given)


def _texts(
    before: str, schema: Raw, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[StructuredOutput]:
    """Yield the structured outputs that are set. `before`: common prefix of the four parameter names."""
    if _is_given(schema):
        place = f"{before}json"
        yield StructuredOutput(kind="json_schema", text=schema_text(place, schema, or_text=True), param=place)
    if choice is not None:
        place = f"{before}choice"
        yield StructuredOutput(kind="choice", text=encode(choice).decode(), param=place)
    for name, kind, text in (("regex", "regex", regex), ("grammar", "lark", grammar)):
        if text is not None:
            yield StructuredOutput(kind=kind, text=text, param=before + name)


def _is_given(value: Raw) -> bool:
    return bytes(value) not in _ABSENT


def schema_text(param: str, schema: Raw, *, or_text: bool = False) -> str:
    """Return the text of a schema. `or_text`: it may have been sent as a string.

    Raises `RequestError` if it is not a JSON object.
    """
    if not _is_given(schema):
        raise wrong(param, "is required")
    try:
        written = bytes(schema)
        if or_text and written[:1] == b'"':
            written = _string.decode(written).encode()
        if is_too_deep(written):
            raise wrong(param, "is nested too deeply")
        _object.decode(written)
        return written.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise wrong(param, f"must be a JSON object with a JSON Schema: {error}") from None
