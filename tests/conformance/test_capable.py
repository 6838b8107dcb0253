"""The answers of the capable worker: a function of the conversation and its tools."""

from __future__ import annotations

import math
from typing import Any

import jsonschema
import pytest

from tests.conformance.capable import MEANT, leant, made
from worker.contract.engine import Logprob

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        CITY,
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"type": ["number", "null"], "minimum": 5},
        {"const": {"a": 1}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}}},
        {"properties": {"any": True}},
    ],
)
def test_arguments_fit_their_schema(schema: dict[str, Any]) -> None:
    jsonschema.validate(made(schema, "Nothing that helps"), schema)


def test_intended_token_is_most_likely_and_probabilities_sum_to_one() -> None:
    found = Logprob(math.log(0.1), ((7, math.log(0.6)), (8, math.log(0.3)), (9, math.log(0.1))))
    told = leant(found, 9)
    assert [token for token, _ in told.top] == [9, 7, 8]
    assert told.top[0][1] == told.logprob > math.log(MEANT)
    assert math.isclose(sum(math.exp(logprob) for _, logprob in told.top), 1)
    assert [token for token, _ in leant(found, 5).top] == [5, 7, 8]
    assert leant(Logprob(-1.0), 5).top == ()
