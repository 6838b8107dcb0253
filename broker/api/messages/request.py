"""Conversion of a checked body of Anthropic's messages to `Generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from broker.api.messages.body import Body, Prompt, ToolChoice, offered_tools
from broker.api.messages.conversation import late_tools
from broker.dialects import tools
from broker.dialects.body import encode
from broker.dialects.normalize import prompt_end_options
from broker.dialects.parameters import seed_of, sparse_of, token_limit
from broker.dialects.sessions import name_conversation
from broker.dialects.tools import ToolOffer, offer
from protocol.conversation import ends_with_prefill, pack
from protocol.messages import Generate
from protocol.types import Media, Sampling, StructuredOutput, TokenizeOptions

Messages = Sequence[dict[str, Any]]


def generate(
    body: Body, messages: Messages, media: list[Media], *, id: str, incarnation: str, thinks: bool
) -> Generate:
    """Make the request to the worker. Raises `RequestError` if it cannot be encoded.

    `thinks`: whether the model is a reasoning model; for others a thinking budget is dropped.
    """
    return replace(
        _prompt(body, messages, media, id=id, incarnation=incarnation),
        sampling=_sampling(body),
        stop=body.stop_sequences or [],
        max_tokens=token_limit(body.max_tokens),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        session=name_conversation(messages),
        cache_pin=bool(body.cache_pin),
        sparse=sparse_of(body.sparse_prefill),
        thinking_budget=body.reasoning_options.budget_tokens if thinks else None,
        form=_form(body),
        calling=_offer(body).calling,
    )


def count(prompt: Prompt, messages: Messages, media: list[Media], *, id: str, incarnation: str) -> Generate:
    """Make a request that only counts the tokens of the prompt."""
    asked = _prompt(prompt, messages, media, id=id, incarnation=incarnation)
    return replace(asked, tokenizing=TokenizeOptions())


def _prompt(prompt: Prompt, messages: Messages, media: list[Media], *, id: str, incarnation: str) -> Generate:
    offered = _offer(prompt)
    wishes = prompt.reasoning_options.template_kwargs | prompt_end_options(
        messages, continues=ends_with_prefill(messages), opens=None
    )
    return Generate(
        incarnation=incarnation,
        id=id,
        sampling=Sampling(seed=0),
        messages=pack(messages),
        tools=pack(offered.tools) if offered.tools else UNSET,
        late_tools=pack(offered.late) if offered.late else UNSET,
        template_kwargs=pack(wishes) if wishes else UNSET,
        media=media,
    )


def _sampling(body: Body) -> Sampling:
    """Return the sampling parameters."""
    return Sampling(
        seed=seed_of(body.seed),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _offer(prompt: Prompt) -> ToolOffer:
    """Return the offer for the tools and the choice, converted to those of chat."""
    functions = offered_tools(prompt)
    choice = prompt.tool_choice or ToolChoice("auto")
    single = bool(choice.disable_parallel_tool_use)
    listed = [tools.Tool(function=function) for function in functions]
    return offer(listed, _wish(choice), single=single, late=late_tools(prompt))


def _wish(choice: ToolChoice) -> tools.ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return tools.Choice(name=choice.name)
        case wish:
            return wish


def _form(body: Body) -> StructuredOutput | None:
    """Return the structured output of the body; None: unconstrained."""
    config = body.output_config
    places = {
        "output_config.format.schema": config.format if config else None,
        "output_format.schema": body.output_format,
    }
    for place, format in places.items():
        if format is not None:
            return StructuredOutput(kind="json_schema", text=encode(format.schema).decode(), param=place)
    return None
