"""Reasoning options of a body: whether the model reasons, with which effort, and for how many tokens.

OpenAI, Anthropic, OpenRouter, vLLM, Qwen and Ollama have different names for these. All are read here, for
every dialect. Fields that contradict each other are a 400; a budget or an effort does not contradict the
absence of reasoning, since it only says how reasoning would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Struct

from broker.dialects.body import PositiveInt, convert, extra_schema, refer, refuse, wrong

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FORMATS = ("auto", "parsed", "deepseek")
"""Names of what this server does: llama.cpp's, Groq's and vLLM's."""

_APART = "reasoning is always returned apart from the content: leave this out, and ignore the reasoning"
_KWARGS = "chat_template_kwargs"
_THINKING_TYPES = {"enabled": True, "disabled": False}
TrueOnly = Annotated[bool, extra_schema(const=True)]
FalseOnly = Annotated[bool, extra_schema(const=False)]
"""Flags of which only one value is supported (see `refuse`)."""

T = TypeVar("T", bool, str, int)
Claims = Mapping[str, T | None]
"""What fields of a body say of one option, by their paths; None: nothing."""


class Reasoning(Struct):
    """OpenAI's and OpenRouter's options. `summary`: any length is treated alike; `generate_summary` is its
    legacy name."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: PositiveInt | None = None
    exclude: FalseOnly | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def is_summarized(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"


class Thinking(Struct):
    """Options of Anthropic, GLM, DeepSeek and Kimi. With types other than `enabled` and `disabled`, such as
    `adaptive`, the model decides."""

    type: str
    budget_tokens: int | None = None


class EnabledThinking(Struct):
    """Budget of thinking that is enabled; with other types, any number is passed over."""

    budget_tokens: PositiveInt | None = None


class TemplateBudget(Struct):
    """Budget among the arguments of a chat template."""

    thinking_budget: PositiveInt | None = None


class ReasoningParameters(Struct, kw_only=True):
    """Body fields with reasoning options, whatever the dialect. Raw completions ignore them."""

    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    enable_thinking: bool | None = None
    thinking_budget: PositiveInt | None = None
    thinking_token_budget: PositiveInt | None = None
    include_reasoning: TrueOnly | None = None
    separate_reasoning: TrueOnly | None = None
    reasoning_format: Annotated[str, extra_schema(enum=[*FORMATS])] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], extra_schema(**refer("TemplateBudget"))] | None = None
    extra_body: Annotated[Any, extra_schema(maxProperties=0)] = None


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """`template_kwargs`: arguments of the chat template, with the others that the client has named."""

    template_kwargs: dict[str, Any]
    effort: str | None = None
    budget_tokens: int | None = None


def options(body: ReasoningParameters, *, output_effort: str | None = None) -> ReasoningOptions:
    """Return the reasoning options of a body. `output_effort`: Anthropic's `output_config.effort`.

    Raises `RequestError` naming the parameter at fault.
    """
    _refuse_unserved(body)
    kwargs = body.chat_template_kwargs or {}
    efforts = _efforts(body, kwargs) | {"output_config.effort": output_effort}
    effort, enabled = _agreed(efforts), _agreed(_switches(body, kwargs, efforts))
    budgets = _budgets(body, kwargs)
    wishes = {"reasoning_effort": effort, "enable_thinking": enabled}
    named = {name: wish for name, wish in wishes.items() if wish is not None}
    return ReasoningOptions(kwargs | named, effort, _agreed(budgets))


def _efforts(body: ReasoningParameters, kwargs: Mapping[str, Any]) -> dict[str, str | None]:
    effort = kwargs.get("reasoning_effort")
    return {
        f"{_KWARGS}.reasoning_effort": effort if isinstance(effort, str) else None,
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": body.reasoning.effort if body.reasoning else None,
        "think": body.think if isinstance(body.think, str) else None,
    }


def _switches(
    body: ReasoningParameters, kwargs: Mapping[str, Any], efforts: Claims[str]
) -> dict[str, bool | None]:
    thinking = body.thinking
    if isinstance(thinking, Thinking):
        thinking = _THINKING_TYPES.get(thinking.type)
    switches = {name: kwargs.get(name) for name in ("enable_thinking", "thinking")}
    return {
        **{f"{_KWARGS}.{name}": on if isinstance(on, bool) else None for name, on in switches.items()},
        "enable_thinking": body.enable_thinking,
        "thinking": thinking,
        "think": None if body.think is None else bool(body.think),
        "reasoning.enabled": body.reasoning.enabled if body.reasoning else None,
        **{name: False for name, effort in efforts.items() if effort == "none"},
    }


def _budgets(body: ReasoningParameters, kwargs: Mapping[str, Any]) -> dict[str, int | None]:
    thinking = body.thinking if isinstance(body.thinking, Thinking) else Thinking("disabled")
    enabled = {"budget_tokens": thinking.budget_tokens} if thinking.type == "enabled" else {}
    return {
        f"{_KWARGS}.thinking_budget": convert(kwargs, TemplateBudget, _KWARGS).thinking_budget,
        "thinking_budget": body.thinking_budget,
        "thinking_token_budget": body.thinking_token_budget,
        "thinking.budget_tokens": convert(enabled, EnabledThinking, "thinking").budget_tokens,
        "reasoning.max_tokens": body.reasoning.max_tokens if body.reasoning else None,
    }


def _agreed(claims: Claims[T]) -> T | None:
    """Return what the fields say. Raises `RequestError` if two of them differ."""
    given = [(name, value) for name, value in claims.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise wrong(name, f"contradicts '{given[0][0]}': send only one of them")
    return given[0][1] if given else None


def _refuse_unserved(body: ReasoningParameters) -> None:
    if body.extra_body:
        raise refuse("extra_body", "is an option of OpenAI's Python client: send its fields at the top level")
    if body.reasoning_format not in (None, *FORMATS):
        raise refuse("reasoning_format", f"must be one of {', '.join(FORMATS)}: {_APART}")
    hides = {
        "reasoning.exclude": body.reasoning is not None and body.reasoning.exclude,
        "include_reasoning": body.include_reasoning is False,
        "separate_reasoning": body.separate_reasoning is False,
    }
    for name, is_hidden in hides.items():
        if is_hidden:
            raise refuse(name, f"is not supported: {_APART}")
