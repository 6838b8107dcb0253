"""Structured output: each request field that selects it, in both of OpenAI's dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.chat import body as chat_body
from broker.api.chat import chat
from broker.api.completions import completions
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import StructuredOutput
from protocol.wire import decode_to_worker, encode

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {"é": {}},
}  # fmt: skip
TEXT = json.dumps(SCHEMA)
FIRST = {"chat": {"messages": [{"role": "user", "content": "hello"}]}, "completions": {"prompt": "hello"}}


def of_chat(raw: bytes) -> Generate:
    read = chat_body.read(raw)
    messages = chat.conversation(read, system_in_place=False).messages
    return chat.generate(read, messages, [], id="a", incarnation="gateway")


def of_completions(raw: bytes) -> Generate:
    return completions.generate(completions.read(raw), id="a", incarnation="gateway")[0]


SENT: dict[str, Callable[[bytes], Generate]] = {"chat": of_chat, "completions": of_completions}


def written(dialect: str, fields: dict[str, Any]) -> bytes:
    return json.dumps(FIRST[dialect] | fields).encode()


def sent(dialect: str, fields: dict[str, Any]) -> StructuredOutput | None:
    return SENT[dialect](written(dialect, fields)).form


def with_schema(dialect: str, text: bytes) -> bytes:
    """Return a body whose schema is the raw JSON `text`, which no encoder would write."""
    return written(dialect, {"guided_json": 0}).replace(b'"guided_json": 0', b'"guided_json": ' + text)


def refusal(dialect: str, raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SENT[dialect](raw)
    return caught.value


def schema_at(place: str, *, strict: bool = True) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", text=TEXT, param=place, strict=strict)


loose = partial(schema_at, strict=False)


def form(kind: Any, param: str, text: str = "") -> StructuredOutput:
    return StructuredOutput(kind=kind, param=param, text=text)


def described(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", **fields}}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


FLAT = {"schema": SCHEMA, "strict": True}
HELD: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, form("json_object", "response_format")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, loose("response_format.schema")),
    ({"response_format": {"type": "json_schema"} | FLAT}, schema_at("response_format.schema")),
    ({"response_format": {"type": "json_object"} | FLAT}, schema_at("response_format.schema")),
    (
        {"response_format": described(schema=SCHEMA)["response_format"] | {"strict": True}},
        schema_at("response_format.json_schema.schema"),
    ),
    (described(schema=SCHEMA, strict=True), schema_at("response_format.json_schema.schema")),
    (described(schema=SCHEMA), loose("response_format.json_schema.schema")),
    ({"json_schema": TEXT, "grammar": ""}, loose("json_schema")),
    (structured(json=SCHEMA), schema_at("structured_outputs.json")),
    (structured(choice=["rot", "駅", ""]), form("choice", "structured_outputs.choice", '["rot","駅",""]')),
    (structured(grammar='start: "a"'), form("lark", "structured_outputs.grammar", 'start: "a"')),
    (structured(json_object=True), form("json_object", "structured_outputs.json_object")),
    (structured(json_object=False, regex="a"), form("regex", "structured_outputs.regex", "a")),
    ({"guided_json": SCHEMA}, schema_at("guided_json")),
    ({"guided_choice": ["a", "b"]}, form("choice", "guided_choice", '["a","b"]')),
    ({"guided_grammar": 'start: "a"'}, form("lark", "guided_grammar", 'start: "a"')),
    ({"guided_regex": "a", "response_format": {"type": "text"}, "guided_decoding_backend": "xgrammar"},
     form("regex", "guided_regex", "a")),
]  # fmt: skip


@pytest.mark.parametrize("dialect", SENT)
@pytest.mark.parametrize(("fields", "expected"), HELD, ids=[str(fields)[:60] for fields, _ in HELD])
def test_a_form_is_taken_by_each_of_its_names(dialect: str, fields: Any, expected: Any) -> None:
    assert sent(dialect, fields) == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (described(), "response_format.json_schema.schema"),
    (described(schema=TEXT), "response_format.json_schema.schema"),
    (described(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
    (structured(json='{"a": ' + "[" * 20_000 + "]" * 20_000 + "}"), "structured_outputs.json"),
    (structured(regex=""), "structured_outputs.regex"),
    (structured(choice=[]), "structured_outputs.choice"),
    (structured(choice=["a", 1]), "structured_outputs.choice[1]"),
    ({"guided_json": "{'a': 1}"}, "guided_json"),
    # Two constraints at once.
    (structured(json=SCHEMA, regex="a"), "structured_outputs.regex"),
    ({"json_schema": SCHEMA} | structured(json=SCHEMA), "json_schema"),
    (described(schema=SCHEMA) | {"guided_choice": ["a"]}, "guided_choice"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize("dialect", SENT)
@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{p}-{n}" for n, (_, p) in enumerate(WRONG)])
def test_a_form_that_is_none_is_named(dialect: str, fields: dict[str, Any], param: str) -> None:
    error = refusal(dialect, written(dialect, fields))
    assert (error.code, error.param) == (Code.INVALID_REQUEST, param)
    assert f"'{param}'" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("dialect", SENT)
@pytest.mark.parametrize(
    ("fields", "param", "instead"),
    [
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type", ""),
        (structured(structural_tag="{}"), "structured_outputs.structural_tag", ""),
        (structured(json={}, whitespace_pattern=" ?"), "structured_outputs.whitespace_pattern", ""),
        ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern", ""),
        ({"grammar": {"type": "json", "value": SCHEMA}}, "grammar", "'json_schema'"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", "'structured_outputs.grammar'"),
        ({"format": SCHEMA}, "format", "'response_format'"),
    ],
)
def test_another_servers_constraint_is_refused_with_what_to_use_instead(
    dialect: str, fields: dict[str, Any], param: str, instead: str
) -> None:
    error = refusal(dialect, written(dialect, fields))
    assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, param)
    assert f"'{param}'" in error.message
    assert instead in error.message


@pytest.mark.parametrize("dialect", SENT)
@pytest.mark.parametrize("broken", [b'{"\xff": 1}', b'{"a": "\\ud800"}', b"{" * 20_000, b'{"a": NaN}'])
def test_a_schema_that_is_no_json_is_a_refusal(dialect: str, broken: bytes) -> None:
    assert refusal(dialect, with_schema(dialect, broken)).code is Code.INVALID_REQUEST


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from([*SENT]))
def test_a_schema_arrives_as_it_was_written(schema: dict[str, Any], dialect: str) -> None:
    """White space, key order and numbers beyond any machine type are preserved."""
    text = json.dumps(schema, ensure_ascii=False, indent=1)
    raw = with_schema(dialect, b" %b " % text.encode())
    message = SENT[dialect](raw)
    assert message.form == form("json_schema", "guided_json", text)
    arrived, _ = decode_to_worker(encode(message))
    assert arrived == message
