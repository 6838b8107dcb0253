"""Structured-output parameters of a body -> `StructuredOutput`.

Reads OpenAI's `response_format`, vLLM's `structured_outputs`, its earlier `guided_*`, and llama.cpp's and
SGLang's `json_schema`. Only the shape is checked here; the worker compiles schemas and grammars. A schema
stays text while its request waits, because parsed it takes up to thirty times the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from broker.dialects.body import encode, refuse
from broker.dialects.json_size import is_too_deep
from broker.dialects.parameters import Parameters
from protocol.errors import Code, RequestError
from protocol.types import StructuredOutput

_ABSENT = (b"", b"null")

_object: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_string: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)

T = TypeVar("T", str, list[str])

FOREIGN = {
    "grammar": "is not supported: use 'json_schema', or 'structured_outputs.grammar' in Lark's notation",
    "ebnf": "is not supported: use 'structured_outputs.grammar', in Lark's notation",
    "regex": "is not supported: use 'structured_outputs.regex'",
    "format": "is not supported: use 'response_format'",
}
"""Parameters of llama.cpp, SGLang and Ollama that would constrain the answer, and what to use instead."""


class JsonSchema(Struct):
    """A named schema. Unless `strict`, what cannot be enforced is relaxed. `name` has no effect."""

    schema: Raw = field(default_factory=Raw)
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """OpenAI's `response_format`. llama.cpp and others also accept `schema` with type `json_object`.

    `strict` may stand here as well.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: Raw = field(default_factory=Raw)
    strict: bool | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: one of the first six fields, with options."""

    json: Raw = field(default_factory=Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = field(default_factory=Raw)
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class FormParameters(Parameters, kw_only=True):
    """Body fields of the dialects with structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Raw = field(default_factory=Raw)
    json_schema: Raw = field(default_factory=Raw)
    grammar: Any = None
    ebnf: Any = None
    regex: Any = None
    format: Any = None


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
        message = f"'{forms[1].param}' cannot be combined with '{forms[0].param}'."
        raise RequestError(Code.INVALID_REQUEST, message, param=forms[1].param)
    return forms[0] if forms else None


def _refuse_unserved(body: FormParameters) -> None:
    for name, why in FOREIGN.items():
        if getattr(body, name):
            raise refuse(name, why)
    told = body.structured_outputs or StructuredOutputs()
    if body.response_format is not None and body.response_format.type == "structural_tag":
        raise refuse("response_format.type", "must be 'text', 'json_object' or 'json_schema'")
    tags = {"structural_tag": body.structural_tag, "structured_outputs.structural_tag": told.structural_tag}
    for name, tag in tags.items():
        if _is_given(tag):
            raise refuse(name, "is not supported: tags in the middle of a text cannot be enforced")
    unserved = {
        "structured_outputs.whitespace_pattern": told.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": told.disable_any_whitespace,
        "structured_outputs.disable_additional_properties": told.disable_additional_properties,
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
    }
    for name, wish in unserved.items():
        if wish:
            raise refuse(name, "is not supported: express it in the schema, or leave it to the model")


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


def _vllm(told: StructuredOutputs | None) -> Iterator[StructuredOutput]:
    if told is None:
        return
    yield from _texts("structured_outputs.", told.json, told.regex, told.choice, told.grammar)
    if told.json_object:
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
        yield StructuredOutput(kind="choice", text=encode(_filled(place, choice)).decode(), param=place)
    for name, kind, text in (("regex", "regex", regex), ("grammar", "lark", grammar)):
        if text is not None:
            yield StructuredOutput(kind=kind, text=_filled(before + name, text), param=before + name)


def _is_given(value: Raw) -> bool:
    return bytes(value) not in _ABSENT


def schema_text(param: str, schema: Raw, *, or_text: bool = False) -> str:
    """Return the text of a schema. `or_text`: it may have been sent as a string.

    Raises `RequestError` if it is not a JSON object.
    """
    if not _is_given(schema):
        raise RequestError(Code.INVALID_REQUEST, f"'{param}' is required.", param=param)
    try:
        written = bytes(schema)
        if or_text and written[:1] == b'"':
            written = _string.decode(written).encode()
        if is_too_deep(written):
            raise RequestError(Code.INVALID_REQUEST, f"'{param}' is nested too deeply.", param=param)
        _object.decode(written)
        return written.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = f"must be a JSON object with a JSON Schema: {error}"
    raise RequestError(Code.INVALID_REQUEST, f"'{param}' {why}.", param=param)


def _filled(param: str, value: T) -> T:
    if not value:
        raise RequestError(Code.INVALID_REQUEST, f"'{param}' must not be empty.", param=param)
    return value
