"""Malformed schemas: whatever a keyword's value is, the request is refused or served."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.types import StructuredOutput
from tests.worker.grammars.sampling import small
from worker.grammars.calls import CallForm, CallsGrammar, ToolSchema
from worker.grammars.compiler import GrammarError
from worker.grammars.references import SchemaError
from worker.grammars.response_formats import ResponseFormatError, compile_relaxed, grammar_of

KEYWORDS = [
    "$ref", "$defs", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "format",
    "items", "maximum", "exclusiveMinimum", "maxLength", "maxItems", "minLength", "minProperties",
    "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
    "x-guidance",
]  # fmt: skip
POINTERS = ["#", "#/$defs/a", "#/properties/a"]
WORDS = [*POINTERS, "object", "string", "null", "^a", "a$|b", "[", "\x00", "\ud800", ""]
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([2**70, -0.5, 1e300, *WORDS])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b c"]), inner, max_size=4),
    ),
    max_leaves=12,
)
SCHEMAS = st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5)


def refusal(compiled: Callable[[], object]) -> str:
    """Return the refusal, empty if it is served. Other exceptions propagate."""
    try:
        compiled()
    except (ResponseFormatError, SchemaError, GrammarError) as error:
        return str(error)
    return ""


@given(schema=SCHEMAS)
@settings(max_examples=120)
def test_a_malformed_schema_breaks_nothing(schema: Any) -> None:
    form = StructuredOutput(kind="json_schema", text=json.dumps(schema))
    compile = small().compiler.compile
    assert "cannot be compiled" not in refusal(lambda: compile(grammar_of(form)))
    assert "cannot be compiled" not in refusal(lambda: compile_relaxed(partial(grammar_of, form), compile))


@pytest.mark.parametrize("kind", [None, "mistral", "qwen3_coder", "muse_spark"])
@example(schema={"anyOf": [True]}, name="a")
@given(schema=SCHEMAS | VALUES, name=st.sampled_from(["a", 'q"uo\\te', "</tool_call>", "日"]))
@settings(max_examples=30)
def test_malformed_parameters_of_a_tool_break_nothing(kind: str | None, schema: Any, name: str) -> None:
    form, tools = CallForm(kind, names=small().lexicon.names), [ToolSchema(name, schema)]
    said = refusal(lambda: small().compiler.compile(CallsGrammar(form, tools).required(single=False)))
    assert "cannot be compiled" not in said
