"""Anthropic's messages: a checked body -> `Generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from broker.dialects.body import encode
from broker.dialects.messages.body import Body, Prompt, Tool
from protocol.conversation import pack
from protocol.messages import Generate
from protocol.parts import Calling, Form, Media, Sampling, Tokenizing

_SEED_MASK = 2**63 - 1

Messages = Sequence[dict[str, Any]]


def generate(
    body: Body, messages: Messages, media: list[Media], *, id: str, incarnation: str, thinks: bool
) -> Generate:
    """The message to the worker. `thinks`: so does its model, and its thoughts can be told to end. Raises
    `RequestError` for what cannot be passed on."""
    thinking = body.thinking
    limited = thinks and thinking is not None and thinking.type == "enabled"
    return replace(
        _prompt(body, messages, media, id=id, incarnation=incarnation),
        sampling=_sampling(body),
        stop=body.stop_sequences or [],
        max_tokens=body.max_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        cache_pin=bool(body.cache_pin),
        thinking_budget=thinking.budget_tokens if limited and thinking else None,
        form=_form(body),
        calling=_calling(body),
    )


def count(prompt: Prompt, messages: Messages, media: list[Media], *, id: str, incarnation: str) -> Generate:
    """The same for a prompt that is only counted."""
    asked = _prompt(prompt, messages, media, id=id, incarnation=incarnation)
    return replace(asked, tokenizing=Tokenizing())


def _prompt(prompt: Prompt, messages: Messages, media: list[Media], *, id: str, incarnation: str) -> Generate:
    wishes = _wishes(prompt)
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=Sampling(seed=0),
        messages=pack(messages),
        tools=_tools(prompt),
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


def _offered(prompt: Prompt) -> list[Tool]:
    if prompt.tool_choice is not None and prompt.tool_choice.type == "none":
        return []
    return [tool for tool in prompt.tools or [] if tool.is_custom]


def _tools(prompt: Prompt) -> Raw | UnsetType:
    shown = [_shown(tool) for tool in _offered(prompt)]
    return pack(shown) if shown else UNSET


def _shown(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}


def _calling(prompt: Prompt) -> Calling | None:
    """None: freely."""
    offered, choice = _offered(prompt), prompt.tool_choice
    strict = [tool.name or "" for tool in offered if tool.strict]
    calling = Calling(strict=strict)
    if choice is not None and offered:
        name = (choice.name or "") if choice.type == "tool" else ""
        calling = Calling(
            required=choice.type in ("any", "tool"),
            name=name,
            single=bool(choice.disable_parallel_tool_use or name),  # a tool that is named is called once
            strict=strict,
        )
    return None if calling == Calling() else calling


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
