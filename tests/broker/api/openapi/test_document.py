"""OpenAPI document: it is valid, and its body schemas agree with the checks of the dialects."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from broker.api.admin import body as admin
from broker.api.batches import body as batch_body
from broker.api.batches.body import MessageBatchBody, read_requests
from broker.api.chat import body as chat_body
from broker.api.completions import completions
from broker.api.embeddings import embeddings, rerank
from broker.api.messages import body as messages
from broker.api.openapi import document as openapi
from broker.api.openapi.operations import OPERATIONS
from broker.api.responses import body as responses
from broker.api.responses import compaction, conversations, request
from broker.api.responses.history import recall
from broker.api.responses.items import PASSED_OVER
from broker.api.tokens import tokens
from protocol.errors import RequestError
from tests.broker.api.responses.stored_responses import response_store, result_of
from tests.conformance import recorder
from tests.faults.documents import RESPONSES, VALID, change_places

DOCUMENT: Any = json.loads(openapi.written(version="1.0", keyed=True))
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
SAID = [{"role": "user", "content": "a"}]


def read_tokenize(raw: bytes) -> None:
    """Read a body of /tokenize. A conversation is read as in chat."""
    if tokens.read_tokenize(raw).is_chat:
        chat_body.read(raw)


def read_response(raw: bytes) -> None:
    """Read a body of /v1/responses, with its items and tools, which are checked later."""
    body = responses.read(raw)
    placed = result_of(recall(body, response_store(), "", bytes_max=2**20)).placed()
    request.offered(body, placed)
    request.conversation(body, placed, system_in_place=True)


READERS: dict[type, tuple[Callable[[bytes], object], dict[str, Any]]] = {
    chat_body.Body: (chat_body.read, {"messages": SAID, "logprobs": True}),
    chat_body.StreamLookup: (chat_body.read_lookup, {"conversation_ids": ["a"]}),
    completions.Body: (completions.read, {"prompt": "a", "echo": True}),
    messages.Body: (messages.read, {"messages": SAID, "max_tokens": 1}),
    messages.Prompt: (messages.read_prompt, {"messages": SAID}),
    responses.Body: (read_response, {"input": "a"}),
    compaction.CompactBody: (compaction.read, {"input": "a"}),
    conversations.CreateBody: (conversations.read_create, {"items": SAID, "metadata": {"a": "b"}}),
    conversations.UpdateBody: (conversations.read_update, {"metadata": {}}),
    conversations.ItemsBody: (conversations.read_items, {"items": SAID}),
    batch_body.BatchBody: (
        batch_body.read_batch,
        {"input_file_id": "a", "endpoint": batch_body.ENDPOINTS[0], "completion_window": batch_body.WINDOW},
    ),
    MessageBatchBody: (read_requests, {"requests": [{"custom_id": "a", "params": {}}]}),
    embeddings.Body: (embeddings.read, {"input": "a"}),
    admin.AdapterFolder: (admin.read_folder, {"name": "a", "folder": "/a"}),
    admin.LoraFolder: (admin.read_lora_folder, {"lora_name": "a", "lora_path": "/a"}),
    admin.LoraName: (admin.read_lora_name, {"lora_name": "a"}),
    admin.ModelChoice: (admin.read_choice, {"model": "a"}),
    rerank.Body: (rerank.read, {"query": "a", "documents": ["b"]}),
    tokens.Tokenize: (read_tokenize, {"prompt": "a"}),
    tokens.Detokenize: (tokens.read_detokenize, {"tokens": [1]}),
}
"""Reader of each body, with the fields of a valid one."""


def parts(value: Any) -> Iterator[Any]:
    yield value
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(inside)


def schema_of(path: str) -> dict[str, Any]:
    """Return the schema of the body posted to `path`."""
    content = DOCUMENT["paths"][path.partition("?")[0]]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def is_valid(path: str, body: Any) -> bool:
    """Return whether the OpenAPI document allows the body."""
    return bool(Draft202012Validator(DOCUMENT | schema_of(path)).is_valid(body))


def is_taken(kind: type, fields: dict[str, Any]) -> bool:
    """Return whether the dialect's reader accepts the fields."""
    try:
        READERS[kind][0](json.dumps(fields).encode())
    except RequestError:
        return False
    return True


PATHS = {operation.body: operation.path for operation in OPERATIONS if operation.body}
KINDS = {path: kind for kind, path in PATHS.items()}


def forms(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and those of which a value needs only one."""
    yield schema
    for form in schema.get("anyOf", ()):
        yield from forms(form)


RANGES = [
    (kind, name, form["minimum"], form["maximum"])
    for kind, path in PATHS.items()
    for name, schema in SCHEMAS[schema_of(path)["$ref"].rpartition("/")[2]]["properties"].items()
    for form in forms(schema)
    if "minimum" in form and name not in ("n", "best_of")
]


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for name, schema in SCHEMAS.items():
        assert re.fullmatch(r"[\w.-]+", name)
        Draft202012Validator.check_schema(schema)
    references = {part["$ref"] for part in parts(DOCUMENT) if isinstance(part, dict) and "$ref" in part}
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= SCHEMAS.keys()
    assert "broker" not in json.dumps(list(SCHEMAS))


def test_every_operation_has_what_openapi_asks_of_it() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"].keys() >= {"title", "version"}
    operations = [(path, of) for path, methods in DOCUMENT["paths"].items() for of in methods.values()]
    assert len({of["operationId"] for _, of in operations}) == len(operations) == len(OPERATIONS)
    for path, of in operations:
        parameters = of.get("parameters", [])
        assert len({(each["name"], each["in"]) for each in parameters}) == len(parameters)
        required = {each["name"] for each in parameters if each["in"] == "path" and each["required"]}
        assert required == set(re.findall(r"{(\w+)}", path))
        assert all(each["description"] for each in of["responses"].values())
        assert set(of["responses"]) <= {"default"} | {str(status) for status in range(200, 600)}
    ways = {name for way in DOCUMENT["security"] for name in way}
    assert ways == set(DOCUMENT["components"]["securitySchemes"])


def test_whatever_can_be_streamed_is_described_as_a_stream_too() -> None:
    asking = [of for methods in DOCUMENT["paths"].values() for of in methods.values() if "requestBody" in of]
    for operation in asking:
        [content] = operation["requestBody"]["content"].values()
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        can_stream = "stream" in SCHEMAS.get(name, {}).get("properties", {})
        kinds = operation["responses"]["200"]["content"]
        assert ("text/event-stream" in kinds) == can_stream, operation["operationId"]


def test_every_body_of_the_table_can_be_read() -> None:
    assert READERS.keys() == set(PATHS)
    for kind, (_, body) in READERS.items():
        assert is_taken(kind, body)
        assert is_valid(PATHS[kind], body)


AGENTS = [recorder.load(name).requests[-1] for name in recorder.names()]


@pytest.mark.parametrize(("path", "body"), [*VALID, *((sent.path, sent.body) for sent in AGENTS)])
def test_valid_examples_are_taken_and_match_the_schema(path: str, body: dict[str, Any]) -> None:
    assert is_valid(path, body)
    assert is_taken(KINDS[path.partition("?")[0]], body)


@given(number=st.integers(0, 10**6))
@settings(max_examples=120)
def test_accepted_requests_match_the_schema(number: int) -> None:
    dice = random.Random(number)
    path, right = dice.choice(VALID)
    body = copy.deepcopy(right)
    change_places(dice, body)
    if is_taken(KINDS[path.partition("?")[0]], body):
        assert is_valid(path, json.loads(json.dumps(body)))


@pytest.mark.parametrize(
    ("item", "fits"),
    [
        ({"type": None, "role": "user"}, True),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}, True),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, True),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, False),
        ({"type": "unheard"}, False),
        *(({"type": kind}, True) for kind in sorted(PASSED_OVER)),
    ],
)
def test_an_item_is_valid_if_it_is_taken(item: dict[str, Any], fits: bool) -> None:
    fields = {"input": [{"role": "user", "content": "a"}, item]}
    assert is_valid(RESPONSES, fields) is fits
    assert is_taken(responses.Body, fields) is fits


@pytest.mark.parametrize(
    ("kind", "name", "low", "high"), RANGES, ids=[f"{k.__module__} {n}" for k, n, _, _ in RANGES]
)
def test_a_range_is_the_one_that_is_checked(kind: type, name: str, low: float, high: float) -> None:
    step = 1 if isinstance(low, int) and isinstance(high, int) else 0.001
    for value, fits in ((low, True), (high, True), (low - step, False), (high + step, False), (None, True)):
        if value is None and name == "max_tokens" and kind is messages.Body:
            continue
        body = READERS[kind][1] | {name: value}
        assert is_valid(PATHS[kind], body) is fits, value
        assert is_taken(kind, body) is fits, value
