"""Anthropic's messages: a checked body -> `Generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from broker.dialects import begun, tools
from broker.dialects.body import encode
from broker.dialects.messages.body import Body, Prompt, ToolChoice
from broker.dialects.parameters import sparse_of
from broker.dialects.tools import FunctionTool, Offer, offer
from protocol.conversation import is_begun, pack
from protocol.messages import Generate
from protocol.parts import Form, Media, Sampling, Tokenizing

_SEED_MASK = 2**63 - 1

Messages = Sequence[dict[str, Any]]


def generate(
    body: Body, messages: Messages, media: list[Media], *, id: str, incarnation: str, thinks: bool
) -> Generate:
    """The message to the worker. `thinks`: whether its model does; a budget means nothing to any other.
    Raises `RequestError` for what cannot be passed on."""
    return replace(
        _prompt(body, messages, media, id=id, incarnation=incarnation),
        sampling=_sampling(body),
        stop=body.stop_sequences or [],
        max_tokens=body.max_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        cache_pin=bool(body.cache_pin),
        sparse=sparse_of(body.sparse_prefill),
        thinking_budget=body.thought_tokens_max if thinks else None,
        form=_form(body),
        calling=_offer(body).calling,
    )


def count(prompt: Prompt, messages: Messages, media: list[Media], *, id: str, incarnation: str) -> Generate:
    """The same for a prompt that is only counted."""
    asked = _prompt(prompt, messages, media, id=id, incarnation=incarnation)
    return replace(asked, tokenizing=Tokenizing())


def _prompt(prompt: Prompt, messages: Messages, media: list[Media], *, id: str, incarnation: str) -> Generate:
    shown = _offer(prompt).tools
    wishes = _wishes(prompt) | begun.options(messages, continues=is_begun(messages), opens=None)
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=Sampling(seed=0),
        messages=pack(messages),
        tools=pack(shown) if shown else UNSET,
        template_kwargs=pack(wishes) if wishes else UNSET,
        media=media,
    )


def _sampling(body: Body) -> Sampling:
    """A request without a seed gets one here, so that it can be repeated."""
    return Sampling(
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _wishes(prompt: Prompt) -> dict[str, Any]:
    """What the template is told beside the messages. Who says nothing of thinking, or leaves it to the model,
    gets what the template does by itself: the same prompt as in the other dialects."""
    wishes: dict[str, Any] = {}
    if prompt.output_config is not None and prompt.output_config.effort is not None:
        wishes["reasoning_effort"] = prompt.output_config.effort
    if prompt.thinking is not None and prompt.thinking.type in ("enabled", "disabled"):
        wishes["enable_thinking"] = prompt.thinking.type == "enabled"
    return wishes


def _offer(prompt: Prompt) -> Offer:
    """The tools and the choice, as chat would have them said."""
    functions = [
        FunctionTool(tool.name or "", tool.description, tool.input_schema, tool.strict)
        for tool in prompt.tools or []
        if tool.is_custom
    ]
    choice = prompt.tool_choice or ToolChoice("auto")
    single = bool(choice.disable_parallel_tool_use)
    return offer([tools.Tool(function=function) for function in functions], _wish(choice), single=single)


def _wish(choice: ToolChoice) -> tools.ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return tools.Choice(name=choice.name)
        case wish:
            return wish


def _form(body: Body) -> Form | None:
    """None: whatever the content likes to be."""
    config = body.output_config
    places = {
        "output_config.format.schema": config.format if config else None,
        "output_format.schema": body.output_format,
    }
    for place, format in places.items():
        if format is not None:
            return Form(kind="json_schema", text=encode(format.schema).decode(), param=place)
    return None
