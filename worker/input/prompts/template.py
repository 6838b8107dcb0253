"""Chat template: rendering of messages, and probes of what a template supports."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jinja2
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, ends_with_prefill
from protocol.types import Capabilities
from worker.input.prompts import render_bound
from worker.input.prompts.boundaries import Messages
from worker.input.prompts.wants import (
    ANSWER,
    LATE_USER,
    SYSTEM,
    THOUGHT,
    THOUGHT_KEYS,
    TOOL,
    TOOL_NAME,
    USER,
    Tools,
    Wants,
    complete,
    differences,
    find_wants,
    fit_options,
    lay_out,
)

Render = Callable[..., Any]

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
"""Errors that a template raises on messages it was not written for: its own and Python's. Upstream's own
renderers use assertions."""

RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents"
}
"""Template options that a client must not set; `chat_template`, for one, would replace the template."""
_END = "\ue000continued\ue000"
"""Marks the end of a message that the model continues; occurs in no message."""

_LATE_SYSTEM = {"role": "system", "content": "late-instruction"}


class Template:
    """Chat template with the layout of messages that it wants. Called like `apply_chat_template`, with
    canonical messages. `problem`: why it renders no conversation, as a sentence; empty if it does."""

    def __init__(self, renderer: Render, nulls: Render | None = None) -> None:
        """`renderer`: renders messages as they are, or without their null values; `nulls`: with these. Raises
        `RenderTimeout` if it does not end."""
        self._renderer, self._nulls = renderer, nulls or renderer

        def tried(wants: Wants, messages: Messages, options: Mapping[str, Any]) -> str:
            return attempt(self._in_layout(wants), messages, options=options)

        self.wants = find_wants(tried)
        self._render = self._in_layout(self.wants)
        self.problem = _problem(self._render)

    def __call__(self, messages: Messages, **options: Any) -> Any:
        return self._render(messages, **options)

    def _in_layout(self, wants: Wants) -> Render:
        renderer = self._nulls if wants.null_contents else self._renderer

        def rendered(messages: Messages, *, tools: Tools | None = None, **options: Any) -> Any:
            fitted = fit_options(options, wants)
            return renderer(lay_out(messages, wants), tools=complete(tools), **fitted)

        return rendered


def template_of(tokenizer: TokenizerWrapper) -> Template | None:
    """Return the chat template; None: the model has none.

    Upstream's own renderers, Python modules for a few models, are in the wrapper. All other templates are
    rendered by the tokenizer itself: the wrapper would enable thinking where the template leaves it off.
    """
    inner: PreTrainedTokenizerBase = tokenizer._tokenizer
    if not tokenizer.has_chat_template:
        return None
    if tokenizer._chat_template is not None or inner.chat_template is None:
        return Template(tokenizer.apply_chat_template)
    return Template(inner.apply_chat_template, partial(_render_with_nulls, inner))


def _render_with_nulls(
    tokenizer: PreTrainedTokenizerBase, messages: Any, *, tools: Any, tokenize: bool, **options: Any
) -> str:
    """Render as `apply_chat_template` does, but leave null values in the messages."""
    template = tokenizer.get_chat_template(None, tools)
    named = {**tokenizer.special_tokens_map, **options}
    rendered: Any = render_jinja_template([messages], tools, chat_template=template, **named)
    return str(rendered[0][0])


def _problem(template: Render) -> str:
    try:
        text = render(template, [USER])
    except TEMPLATE_ERRORS as error:
        return f"it fails on every conversation: {reason_of(error)}"
    return "" if USER["content"] in text else "it does not write what the user says."


def reason_of(error: Exception) -> str:
    """Return what a template says of messages that it refuses, or else that it fails on them, as a
    sentence."""
    told = " ".join(str(error).split()).rstrip(".")
    if type(error) is jinja2.TemplateError:  # raised by the template itself
        return f"{told}."
    return f"{type(error).__name__}: {told}. The fault is the template's."


def opens_thoughts(template: Render, start: str) -> bool:
    """Return whether the template opens the reasoning itself if it is enabled; then the model never does."""
    return attempt(template, [USER], options={"enable_thinking": True}).rstrip().endswith(start)


def behind_thoughts(template: Render, end: str) -> str:
    """Return the text between the end of reasoning and the answer: from rendered history, else from the empty
    reasoning that the prompt gets when thinking is off."""
    answered = attempt(template, [USER, ANSWER | {THOUGHT_KEYS[0]: THOUGHT}])
    _, found, behind = answered.rpartition(end)
    if found and ANSWER["content"] in behind:
        return behind[: behind.index(ANSWER["content"])]
    silent = attempt(template, [USER], options={"enable_thinking": False})
    _, found, behind = silent.rpartition(end)
    return behind if found and not behind.strip() else ""


def unlisted_end(template: Render, tokenizer: TokenizerWrapper) -> int | None:
    """Return the special token that ends an answer in the template, if no token there is known as an end."""
    behind = attempt(template, [USER, ANSWER], opens_turn=False).rpartition(ANSWER["content"])[2]
    tokens = tokenizer.encode(behind, add_special_tokens=False) if behind else []
    if not tokens or {*tokens} & {*tokenizer.eos_token_ids}:
        return None
    try:
        added = tokenizer.added_tokens_decoder
    except NotImplementedError:  # Mistral's own tokenizers do not list theirs
        return None
    return tokens[0] if tokens[0] in added and added[tokens[0]].special else None


def render(
    template: Render,
    messages: Messages,
    tools: Tools | None = None,
    options: Mapping[str, Any] = _NO_OPTIONS,
    *,
    opens_turn: bool = True,
) -> str:
    """Render a conversation, including the opening of the model's turn unless `opens_turn` is False.

    If the options say that the model continues the last message, the text ends where that message ends.
    Raises one of `TEMPLATE_ERRORS`, or `RenderTimeout`.
    """
    render_once = partial(_render, template, messages, tools, options, opens_turn=opens_turn)
    return render_bound.within(render_bound.RENDER_S_MAX, render_once)


def _render(
    template: Render,
    messages: Messages,
    tools: Tools | None,
    options: Mapping[str, Any],
    *,
    opens_turn: bool,
) -> str:
    told = {name: option for name, option in options.items() if name != PROMPT_ENDS}
    fixed = {"tools": tools or None, "tokenize": False}
    ends = options.get(PROMPT_ENDS)
    if ends == IN_MESSAGE and ends_with_prefill(messages):
        if not opens_turn:
            return str(template(list(messages[:-1]), add_generation_prompt=False, **fixed, **told))
        marked = {**messages[-1], "content": f"{messages[-1]['content']}{_END}"}
        text = str(template([*messages[:-1], marked], add_generation_prompt=False, **fixed, **told))
        return text[: text.rindex(_END)]
    opens = opens_turn and ends != BEFORE_TURN
    return str(template(list(messages), add_generation_prompt=opens, **fixed, **told))


def attempt(
    template: Render,
    messages: Messages,
    tools: Any = None,
    options: Mapping[str, Any] = _NO_OPTIONS,
    *,
    opens_turn: bool = True,
) -> str:
    """Return the rendered conversation; empty if the template raises. Raises `RenderTimeout`."""
    try:
        return render(template, messages, tools, options, opens_turn=opens_turn)
    except TEMPLATE_ERRORS:
        return ""


def probe(template: Template | None, tokenizer: TokenizerWrapper) -> Capabilities:
    """Probe the chat template's support of late system messages, tools and thinking that a budget ends."""
    if template is None:
        return Capabilities()
    plain = attempt(template, [USER])
    thinking, silent = (attempt(template, [USER], options={"enable_thinking": on}) for on in (True, False))
    late = attempt(template, [SYSTEM, USER, ANSWER, _LATE_SYSTEM, LATE_USER])
    can_end = len(tokenizer.think_end_tokens or ()) == 1
    return Capabilities(
        tools=TOOL_NAME in attempt(template, [USER], [TOOL]),
        thinking=can_end and (thinking != silent or tokenizer.think_start in plain),
        system_in_place=_in_order(late, "first-question", "late-instruction", "late-question"),
        layout=differences(template.wants),
        template_problem=template.problem,
    )


def _in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def rendered_calls(template: Render) -> str:
    """Render an answer with two tool calls; empty if the template cannot."""
    function = {"name": TOOL_NAME, "arguments": {"alpha": "one", "beta": "two"}}
    calls = [{"function": function, "id": f"abcdefgh{number}", "type": "function"} for number in range(2)]
    return attempt(template, [USER, {"role": "assistant", "content": "", "tool_calls": calls}], [TOOL])


def spacing_in(rendered: str) -> Callable[[str, str, str], str]:
    """Return a function (left, right, default): the white space between left and right in `rendered`."""

    def spacing(left: str, right: str, default: str) -> str:
        found = re.findall(rf"{re.escape(left)}(\s*){re.escape(right)}", rendered) if left and right else []
        return str(found[-1]) if found else default

    return spacing
