"""Conversion of a checked body to the conversation, to `Generate`, and to the envelope of the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw
from msgspec.structs import replace

from broker.api.responses.body import Body, Format, Text
from broker.api.responses.items import ConfigurationUpdate, Placed, additional_tools, messages, read
from broker.api.responses.output import OutputStyle
from broker.api.responses.tools import PlacedTools, ResponsesToolOffer, offer, tool_document
from broker.dialects.body import encode, wrong
from broker.dialects.normalize import Conversation, normalize
from broker.dialects.parameters import sampling, sparse_of, stop_strings, token_limit
from broker.dialects.reasoning import Reasoning, options
from broker.dialects.response_format import schema_text
from broker.dialects.sessions import name_conversation
from protocol.conversation import pack
from protocol.messages import Generate
from protocol.types import Media, StructuredOutput

# --- to the worker -----------------------------------------------------------------------------------


def conversation(body: Body, items: Sequence[Placed], *, system_in_place: bool) -> Conversation:
    """Return the canonical conversation: instructions, then `items`. Raises `RequestError`."""
    spoken = messages(items)
    if not spoken:
        raise wrong("input", "must not be empty")
    if body.instructions:
        spoken.insert(0, {"role": "system", "content": body.instructions})
    return normalize(spoken, system_in_place=system_in_place)


def offered(body: Body, items: Sequence[Placed]) -> ResponsesToolOffer:
    """Return the offer of the tools in the body and in `items`. Raises `RequestError`."""
    groups = [PlacedTools("", body.tools or []), *additional_tools(items)]
    return offer(groups, body.tool_choice, single=body.parallel_tool_calls is False)


def configured(body: Body, items: Sequence[Placed]) -> Body:
    """Return the body with the options that `items` have updated. Raises `RequestError`."""
    for _, update in read(items):
        if isinstance(update, ConfigurationUpdate) and update.reasoning is not None:
            asked = body.reasoning or Reasoning()
            body = replace(body, reasoning=replace(asked, effort=update.reasoning.effort))
        if isinstance(update, ConfigurationUpdate) and update.text is not None:
            body = replace(body, text=replace(body.text or Text(), format=update.text.format))
    return body


def generate(
    body: Body,
    offer: ResponsesToolOffer,
    messages: Sequence[dict[str, Any]],
    media: list[Media],
    *,
    id: str,
    incarnation: str,
) -> Generate:
    """Make the request to the worker. Raises `RequestError` if it cannot be encoded."""
    reasoning = options(body)
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=sampling(body, body.logprobs),
        messages=pack(messages),
        tools=pack(offer.shown) if offer.shown else UNSET,
        late_tools=pack(offer.late) if offer.late else UNSET,
        template_kwargs=pack(reasoning.template_kwargs) if reasoning.template_kwargs else UNSET,
        media=media,
        stop=stop_strings(body),
        max_tokens=token_limit(body.max_output_tokens),
        ignore_eos=bool(body.ignore_eos),
        speculation=body.speculation is not False,
        sparse=sparse_of(body.sparse_prefill),
        priority=body.priority or 0,
        cache_salt=body.salt,
        session=body.prompt_cache_key or name_conversation(messages),
        cache_pin=bool(body.cache_pin),
        thinking_budget=reasoning.budget_tokens,
        source="input",
        form=_form(body.text.format if body.text else None),
        calling=offer.calling,
    )


def _form(format: Format | None) -> StructuredOutput | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return StructuredOutput(kind="json_object", param="text.format")
    param = "text.format.schema"
    text = schema_text(param, format.schema)
    return StructuredOutput(kind="json_schema", text=text, param=param, strict=bool(format.strict))


# --- to the client -----------------------------------------------------------------------------------


def style(body: Body, offer: ResponsesToolOffer, *, compacts: bool = False) -> OutputStyle:
    """Return the output options of a body. `compacts`: the output is a compaction."""
    summarized = body.reasoning is not None and body.reasoning.is_summarized
    return OutputStyle(
        summarized=summarized,
        sealed=body.is_sealed,
        namespaces=offer.namespaces,
        customs=offer.customs,
        builtins=offer.builtins,
        compacts=compacts,
    )


def envelope(body: Body, *, id: str, model: str, created_at: int, kept: bool) -> dict[str, Any]:
    """Return the response before its output: the request, with OpenAI's defaults for absent fields.

    Large fields are already encoded. `kept`: whether the response will be stored.
    """
    repeated = {name: getattr(body, name) for name in _REPEATED}
    by_default = {name: default for name, default in _DEFAULTS.items() if getattr(body, name) is None}
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        **repeated,
        "max_output_tokens": token_limit(body.max_output_tokens),
        **by_default,
        "reasoning": _reasoning(body),
        **_cache_options(body),
        "service_tier": "default",
        "store": kept,
        "text": _text(body),
        "tools": Raw(encode([tool_document(tool) for tool in body.tools or []])),
        "truncation": "disabled",  # whatever was requested: prompts are never truncated
        "usage": None,
    }


_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "temperature": 1,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1,
}
_REPEATED = (
    *_DEFAULTS,
    "instructions", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "user",
)  # fmt: skip


def _cache_options(body: Body) -> dict[str, Any]:
    """Return the cache options of a body that has some. Nothing expires before memory runs out."""
    if body.prompt_cache_options is None:
        return {}
    return {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}


def _reasoning(body: Body) -> dict[str, Any]:
    asked = body.reasoning
    summary = (asked.summary or asked.generate_summary) if asked else None
    return {"effort": options(body).effort, "summary": summary}


def _text(body: Body) -> dict[str, Any]:
    format = body.text.format if body.text else None
    shown: dict[str, Any] = {"type": format.type if format else "text"}
    if format and format.type == "json_schema":
        described = {"name": format.name, "description": format.description, "strict": format.strict}
        shown |= described | {"schema": Raw(bytes(format.schema))}
    return {"format": shown, "verbosity": (body.text.verbosity if body.text else None) or "medium"}
