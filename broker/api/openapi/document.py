"""OpenAPI 3.1 document, made from the table of operations.

Body schemas come from the types that decode them. Unknown fields are ignored, so no schema forbids any.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import msgspec

from broker.api.chat import body as chat_body
from broker.api.openapi.operations import OPERATIONS, Operation
from broker.api.responses.body import ITEM
from broker.api.responses.compaction import CompactBody
from broker.api.responses.content import VISUALS
from broker.api.responses.items import ITEMS, PASSED_OVER, Message
from broker.api.tokens.tokens import Tokenize
from broker.dialects.body import SCHEMA_REF, encode, refer
from broker.dialects.reasoning import TemplateBudget
from protocol.errors import KINDS, Code

JSON = "application/json"
NULL = {"type": "null"}
_OURS = re.compile(r"broker\.(?:api|dialects)\.(?:(\w+)\.(?=\1\.))?")
"""What a module's path has before the name of a schema."""
_ENVELOPES = {"openai": "Error", "anthropic": "AnthropicError"}
_RETRY_AFTER = {"retry-after": {"description": "In seconds.", "schema": {"type": "integer", "minimum": 1}}}
_ABOUT = (
    "HEAD is accepted wherever GET is. Unlisted fields are ignored, and null means absent. "
    "Every response has an x-request-id header."
)


@cache
def written(*, version: str, keyed: bool) -> bytes:
    """Return the document as JSON. `keyed`: whether an API key is required."""
    return encode(document(OPERATIONS, version=version, keyed=keyed))


def document(operations: Sequence[Operation], *, version: str, keyed: bool) -> dict[str, Any]:
    """Make the document. `keyed`: whether an API key is required."""
    schemas = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schemas)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    ways: list[dict[str, list[str]]] = [{name: []} for name in schemes]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Roundhouse", "version": version, "description": _ABOUT},
        "security": ways if keyed else [*ways, {}],
        "paths": paths,
        "components": {"schemas": schemas | _errors(), "securitySchemes": schemes},
    }


def _described(operation: Operation, schemas: Collection[str]) -> dict[str, Any]:
    slug = re.sub(r"\W+", "_", operation.path.replace(".json", "")).strip("_") or "root"
    described: dict[str, Any] = {
        "operationId": f"{operation.method}_{slug}",
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": refer(_name(operation.body, schemas))}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.form is not None:
        form = {"multipart/form-data": {"schema": operation.form}}
        described["requestBody"] = {"required": True, "content": form}
    return described | ({"security": []} if operation.is_open else {})


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    return in_path + [
        {"name": name, "in": place, "schema": schema}
        for name, (place, schema) in operation.parameters.items()
    ]


# --- responses ---------------------------------------------------------------------------------------


def _responses(operation: Operation) -> dict[str, Any]:
    content = {"application/json": {"schema": refer(_ENVELOPES[operation.dialect])}}
    refused = {
        str(status): {
            "description": _wording(status),
            "content": content,
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in operation.errors
    }
    other = {"description": "Any other error.", "content": content}
    if operation.method == "head":
        return {"200": _answer(operation)}
    return {str(operation.status): _answer(operation), **refused, "default": other}


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.required is None:
        return {"description": "Success, without a body."}
    if operation.content != JSON:
        return {"description": "Success.", "content": {operation.content: {}}}
    schema = {"type": "object", "required": list(operation.required)}
    content: dict[str, Any] = {JSON: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {}
    return {"description": "With `stream`, as SSE." if operation.streams else "Success.", "content": content}


def _wording(status: int) -> str:
    return " ".join(kind.wording for kind in KINDS.values() if kind.status == status)


def _errors() -> dict[str, Any]:
    """Return the schemas of OpenAI's and Anthropic's error objects."""
    text, known = {"type": "string"}, {"enum": [str(code) for code in Code]}
    openais = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": known}
    anthropics = {"type": text, "message": text}
    return {
        "Error": _object({"error": _object(openais)}),
        "AnthropicError": _object(
            {"type": {"const": "error"}, "error": _object(anthropics), "request_id": text},
        ),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


# --- bodies ------------------------------------------------------------------------------------------

_PRESENT = {"type": "string", "minLength": 1}
_CHAT = {"type": "array", "items": refer("chat.body.Message")}
_WHOLE: dict[type, dict[str, Any]] = {
    chat_body.AudioPart: {"not": {}},
    chat_body.AudioURLPart: {"not": {}},
    chat_body.Message: {
        "if": {"properties": {"role": {"const": "tool"}}},
        "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": _PRESENT}},
    },
    CompactBody: {
        "anyOf": [
            {"required": ["input"], "not": {"properties": {"input": NULL}}},
            {"required": ["previous_response_id"], "properties": {"previous_response_id": _PRESENT}},
        ]
    },
    Tokenize: {
        "anyOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": NULL}},
            {"required": ["messages"], "properties": {"messages": _CHAT, "prompt": NULL}},
        ]
    },
}
"""Limits on several fields together, which the types do not say."""


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the body schemas by name."""
    bodies = {operation.body: None for operation in operations if operation.body is not None}
    parts = {*ITEMS.values(), *VISUALS.values(), TemplateBudget}
    _, typed = msgspec.json.schema_components((*bodies, *parts), ref_template=SCHEMA_REF)
    # Types with the same name are told apart by the path of their module.
    schemas: dict[str, Any] = msgspec.json.decode(_OURS.sub("", encode(typed).decode()))
    for kind, whole in _WHOLE.items():
        schemas[_name(kind, schemas)] |= whole
    for schema in schemas.values():
        _permit_nulls(schema)
    return schemas | {ITEM: _item(schemas)}


def _permit_nulls(schema: dict[str, Any]) -> None:
    """Let every property and entry be null that may be absent (see `broker.dialects.body`)."""
    properties = schema.get("properties", {})
    for name in properties.keys() - set(schema.get("required", ())):
        for form in (properties[name], *properties[name].get("anyOf", ())):
            if entries := form.get("additionalProperties"):
                form["additionalProperties"] = {"anyOf": [entries, NULL]}
        properties[name] = {"anyOf": [properties[name], NULL]}


def _item(schemas: Collection[str]) -> dict[str, Any]:
    """Return the schema of Responses input items: items that are read, ignored items, and references.

    Messages and references may lack a type.
    """
    names: dict[type, list[str]] = {}
    for name, kind in ITEMS.items():
        names.setdefault(kind, []).append(name)
    read = [
        {"allOf": [refer(_name(kind, schemas)), _typed(*of, optional=kind is Message)]}
        for kind, of in names.items()
    ]
    reference = {"properties": {"role": False}, "required": ["id"]}
    passed_over = _typed(*sorted(PASSED_OVER))
    return {"anyOf": [*read, passed_over, {"allOf": [reference, _typed("item_reference", optional=True)]}]}


def _typed(*names: str, optional: bool = False) -> dict[str, Any]:
    """Return the schema of an object with one of these types."""
    kinds = {"enum": [*names, None] if optional else names}
    required = {} if optional else {"required": ["type"]}
    return {"type": "object", "properties": {"type": kinds}, **required}


def _name(kind: type, schemas: Collection[str]) -> str:
    """Return a type's schema name, which includes its module if another type has the same name."""
    full = _OURS.sub("", f"{kind.__module__}.{kind.__name__}")
    return full if full in schemas else kind.__name__
