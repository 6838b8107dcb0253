"""Limits on the values of body fields, as JSON Schema: by type, then by field.

Each is merged into msgspec's schema of the field. A keyword applies only to values of its type, so a range
beside `anyOf` still permits null. The limits are the constants of the checks themselves.
"""

from __future__ import annotations

from typing import Any

from broker.api.batches import body as batch_body
from broker.api.batches.message_body import LINES_MAX, MessageBatchBody
from broker.api.chat import body as chat_body
from broker.api.completions import completions
from broker.api.embeddings import embeddings, rerank
from broker.api.messages import body as messages
from broker.api.messages.content import SearchResultBlock
from broker.api.responses import body as responses
from broker.api.responses import compaction, content, conversations, items
from broker.api.tokens import tokens
from broker.dialects import parameters, reasoning, response_format, tools
from broker.dialects.parameters import (
    CACHE_SALT_CHARACTERS_MAX,
    CHOICES_MAX,
    LOGIT_BIASES_MAX,
    PRIORITY_RANGE,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    TOP_LOGPROBS_MAX,
)

Schema = dict[str, Any]

WHERE = "#/components/schemas/{name}"
"""Reference to the schema of a type, or of a Responses item."""
ITEM = "Item"

TOKENS_MAX = 2**31
NULL: Schema = {"type": "null"}


def _refer(name: str) -> Schema:
    return {"$ref": WHERE.format(name=name)}


def between(low: float, high: float) -> Schema:
    """Return the schema of a number from `low` to `high`."""
    return {"minimum": low, "maximum": high}


def _ranges(table: dict[str, tuple[float, float]]) -> dict[str, Schema]:
    return {name: between(low, high) for name, (low, high) in table.items()}


def _max_tokens(low: int) -> Schema:
    limit = {"type": "integer", **between(low, TOKENS_MAX)}
    return {"anyOf": [limit, {"const": parameters.NO_LIMIT}, NULL]}


_FILLED = {"minLength": 1}
_STOP_STRING = {"minLength": 1, "maxLength": STOP_STRING_CHARACTERS_MAX}
_STOP = _STOP_STRING | {"maxItems": STOP_STRINGS_MAX, "items": _STOP_STRING}
_SALT = {"maxLength": CACHE_SALT_CHARACTERS_MAX}
_BUDGET = between(1, TOKENS_MAX)
_SCHEMA = {"type": "object"}
_CHOSEN = {
    "properties": {"type": {"enum": ["function", "custom", "allowed_tools"]}},
    "required": ["type"],
} | _SCHEMA
# `type` is optional where only text blocks are allowed.
_TEXT_BLOCK = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_TEXT_BLOCKS = {"type": "array", "items": _TEXT_BLOCK | {"required": ["text"]}}
_REASONING: dict[str, Schema] = {
    "thinking_budget": _BUDGET,
    "thinking_token_budget": _BUDGET,
    "include_reasoning": {"enum": [True, None]},
    "separate_reasoning": {"enum": [True, None]},
    "reasoning_format": {"enum": [*reasoning.FORMATS, None]},
    "chat_template_kwargs": {"properties": {"thinking_budget": {"type": ["integer", "null"], **_BUDGET}}},
    "extra_body": {"maxProperties": 0},
}
_PROMPT: dict[str, Schema] = _REASONING | {
    "messages": {"minItems": 1},
    "system": {"anyOf": [{"type": "string"}, _TEXT_BLOCKS, NULL]},
}
_TEXT_PART = {"properties": {"type": {"enum": [*content.TEXTS]}}}
_IMAGES = [kind for kind, part in content.VISUALS.items() if part is content.InputImage]
_IMAGE_PART = {"allOf": [_refer("InputImage"), {"properties": {"type": {"enum": _IMAGES}}}]}
_FILE_PART = {"allOf": [_refer("FileData"), {"properties": {"type": {"const": "input_file"}}}]}
_PART = {
    "anyOf": [_TEXT_PART, _IMAGE_PART, _FILE_PART, _refer("VideoPart"), _refer("FramesPart")],
    "required": ["type"],
}
_TOOL_NAME = {"minLength": 1, "maxLength": tools.NAME_CHARACTERS_MAX}

_COMMON = (
    _ranges(parameters.RANGES)
    | _REASONING
    | {
        "max_tokens": _max_tokens(1),
        "stop": _STOP,
        "logit_bias": {
            "maxProperties": LOGIT_BIASES_MAX,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": between(-100, 100),
        },
        "cache_salt": _SALT,
    }
)
_FORMS = _COMMON | {
    "guided_json": {"type": ["object", "string", "null"]},
    "guided_regex": _FILLED,
    "guided_choice": {"minItems": 1},
    "guided_grammar": _FILLED,
    "guided_whitespace_pattern": {"maxLength": 0},
    "structural_tag": NULL,
    "json_schema": {"type": ["object", "string", "null"]},
    **dict.fromkeys(response_format.FOREIGN, NULL),
}


def _texts(most: int) -> Schema:
    """Return the schema of one text or up to `most` texts, each a string or a list of token ids."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", **between(0, embeddings.TOKEN_MAX)}}
    lists = [{"type": "array", "minItems": 1, "maxItems": most, "items": each} for each in (text, ids)]
    return {"anyOf": [text, ids, *lists]}


_CUT = {"anyOf": [{"type": "integer", **between(1, embeddings.TOKEN_MAX)}, {"const": -1}, NULL]}

_ITEMS_OR_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _refer(ITEM)}]}
_ITEMS: Schema = {"maxItems": conversations.ITEMS_MAX, "items": _refer(ITEM)}
_METADATA: Schema = {
    "maxProperties": conversations.METADATA_MAX,
    "propertyNames": {"maxLength": conversations.KEY_CHARACTERS_MAX},
    "additionalProperties": {"type": "string", "maxLength": conversations.VALUE_CHARACTERS_MAX},
}

FIELDS: dict[type, dict[str, Schema]] = {
    chat_body.Body: _FORMS
    | {
        "messages": {"minItems": 1},
        "max_completion_tokens": _max_tokens(1),
        "top_logprobs": between(0, TOP_LOGPROBS_MAX),
    },
    completions.Body: _FORMS
    | {
        "prompt": _texts(CHOICES_MAX),
        "max_tokens": _max_tokens(0),
        "logprobs": between(0, completions.LOGPROBS_MAX),
        "best_of": between(1, CHOICES_MAX),
    },
    response_format.JsonSchema: {"schema": _SCHEMA},
    response_format.ResponseFormat: {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "schema": {"type": ["object", "null"]},
    },
    response_format.StructuredOutputs: {
        "json": _FORMS["guided_json"],
        "regex": _FILLED,
        "choice": {"minItems": 1},
        "grammar": _FILLED,
        "structural_tag": NULL,
        "whitespace_pattern": {"maxLength": 0},
        "disable_any_whitespace": {"enum": [False, None]},
        "disable_additional_properties": {"enum": [False, None]},
    },
    tools.FunctionTool: {"name": _TOOL_NAME},
    SearchResultBlock: {"content": _TEXT_BLOCKS},
    messages.Prompt: _PROMPT,
    messages.Body: _ranges(messages.RANGES)
    | _PROMPT
    | {
        "max_tokens": _max_tokens(1) | {"not": NULL},
        "stop_sequences": {"maxItems": STOP_STRINGS_MAX, "items": _STOP_STRING},
        "cache_salt": _SALT,
    },
    reasoning.Reasoning: {"max_tokens": _BUDGET, "exclude": {"enum": [False, None]}},
    responses.Body: _COMMON
    | {
        "input": _ITEMS_OR_TEXT,
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, _CHOSEN]},
        "max_output_tokens": _max_tokens(1),
        "max_tool_calls": _BUDGET,
        "top_logprobs": between(0, TOP_LOGPROBS_MAX),
        "prompt": NULL,
        **dict.fromkeys(responses.FORMATS, NULL),
    },
    compaction.CompactBody: {"input": _ITEMS_OR_TEXT},
    conversations.CreateBody: {"items": _ITEMS, "metadata": _METADATA},
    conversations.UpdateBody: {"metadata": _METADATA},
    conversations.ItemsBody: {"items": {"minItems": 1, **_ITEMS}},
    batch_body.BatchBody: {
        "endpoint": {"enum": batch_body.ENDPOINTS},
        "completion_window": {"const": batch_body.WINDOW},
    },
    MessageBatchBody: {"requests": {"minItems": 1, "maxItems": LINES_MAX}},
    content.InputImage: {"image_url": {"not": NULL}},
    items.Message: {"content": {"items": _PART}},
    items.AgentMessage: {"content": {"items": _PART}},
    items.CallOutput: {"output": {"items": _PART}},
    responses.Format: {"schema": {"type": ["object", "null"]}},
    embeddings.Body: {
        "input": _texts(embeddings.INPUTS_MAX),
        "encoding_format": {"enum": [*embeddings.FORMATS, None]},
        "dimensions": between(1, embeddings.DIMENSIONS_MAX),
        "priority": between(*PRIORITY_RANGE),
        "truncate_prompt_tokens": _CUT,
    },
    rerank.Body: {
        "query": _FILLED,
        "documents": {"minItems": 1, "maxItems": rerank.DOCUMENTS_MAX},
        "top_n": between(1, TOKENS_MAX),
        "priority": between(*PRIORITY_RANGE),
        "truncate_prompt_tokens": _CUT,
        "max_tokens_per_doc": _CUT,
    },
}

_CHAT = {"type": "array", "items": _refer("chat_body.Message")}

WHOLE: dict[type, Schema] = {
    chat_body.AudioPart: {"not": {}},
    chat_body.AudioURLPart: {"not": {}},
    content.InputImage: {"required": ["image_url"]},
    chat_body.Message: {
        "if": {"properties": {"role": {"const": "tool"}}},
        "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string", **_FILLED}}},
    },
    responses.Body: {"required": ["input"]},
    compaction.CompactBody: {
        "anyOf": [
            {"required": ["input"], "not": {"properties": {"input": NULL}}},
            {
                "required": ["previous_response_id"],
                "properties": {"previous_response_id": {"type": "string", **_FILLED}},
            },
        ]
    },
    tokens.Tokenize: {
        "anyOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": NULL}},
            {"required": ["messages"], "properties": {"messages": _CHAT, "prompt": NULL}},
        ]
    },
}
"""Limits that concern a whole body, or a whole part of one."""
