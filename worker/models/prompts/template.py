"""Chat template: rendering of messages, and probes of what a template supports."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jinja2
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from protocol.conversation import BEFORE_TURN, IN_MESSAGE, PROMPT_ENDS, ends_with_prefill
from protocol.types import Capabilities
from worker.models.prompts import render_bound
from worker.models.prompts.boundaries import Messages

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

_SYSTEM = {"role": "system", "content": "first-instruction"}
_USER = {"role": "user", "content": "first-question"}
_ANSWER = {"role": "assistant", "content": "first-answer"}
_LATE_SYSTEM = {"role": "system", "content": "late-instruction"}
_LATE_USER = {"role": "user", "content": "late-question"}
_THOUGHT = "first-thought"
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates look for the reasoning of an answer; the first is the canonical one."""
_SHORT_ID, _LONG_ID = "abcdefgh0", "call_0123456789abcdef01234567"
_CALLING = {"function": {"name": "probe_tool", "arguments": {}}, "id": _SHORT_ID, "type": "function"}
_RESULT = {"role": "tool", "name": "probe_tool", "tool_call_id": _SHORT_ID, "content": "first-result"}
_WISHES: Mapping[str, Any] = {"reasoning_effort": "high", "thinking_budget": 1024}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def template_of(tokenizer: TokenizerWrapper) -> Render | None:
    """Return the function that renders messages; None: the model has no chat template.

    Upstream's own renderers, Python modules for a few models, are in the wrapper. All other templates are
    rendered by the tokenizer itself: the wrapper would enable thinking where the template leaves it off.
    """
    inner: PreTrainedTokenizerBase = tokenizer._tokenizer
    if not tokenizer.has_chat_template:
        return None
    upstreams_own = tokenizer._chat_template is not None or inner.chat_template is None
    renderer: Render = (tokenizer if upstreams_own else inner).apply_chat_template
    if _USER["content"] not in attempt(renderer, [_USER]):
        renderer = _with_parts(renderer)
    if not attempt(renderer, _called(_LONG_ID)) and attempt(renderer, _called(_SHORT_ID)):
        renderer = _with_short_ids(renderer)
    canonical, *others = _THOUGHT_KEYS
    if _shows_thoughts(renderer, canonical):
        return renderer
    key = next((other for other in others if _shows_thoughts(renderer, other)), canonical)
    return renderer if key == canonical else _with_thoughts_under(renderer, key)


def _with_parts(renderer: Render) -> Render:
    """Adapt templates of vision models that read content parts, but drop content that is a string."""

    def split(content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def render_split(messages: Messages, **options: Any) -> Any:
        parts = [{**message, "content": split(message.get("content"))} for message in messages]
        return renderer(parts, **options)

    return render_split if _USER["content"] in attempt(render_split, [_USER]) else renderer


def _shows_thoughts(renderer: Render, key: str) -> bool:
    """Return whether reasoning under `key` is rendered, with answers or at least with tool calls."""
    hidden = _ANSWER | {key: _THOUGHT}
    calling = hidden | {"content": "", "tool_calls": [_CALLING]}
    asked: list[Messages] = [[_USER, hidden], [_USER, calling, _RESULT]]
    return any(_THOUGHT in attempt(renderer, messages) for messages in asked)


def _called(id: str) -> Messages:
    answer = _ANSWER | {"content": "", "tool_calls": [_CALLING | {"id": id}]}
    return [_USER, answer, _RESULT | {"tool_call_id": id}]


def _with_short_ids(renderer: Render) -> Render:
    """Adapt Mistral's templates, which accept only their own format of call ids. Calls and results still
    match."""

    def shorten(item: Mapping[str, Any], key: str) -> dict[str, Any]:
        id = item.get(key)
        if not isinstance(id, str) or (len(id) == len(_SHORT_ID) and id.isascii() and id.isalnum()):
            return dict(item)
        return {**item, key: hashlib.sha256(id.encode()).hexdigest()[: len(_SHORT_ID)]}

    def shorten_all(message: Mapping[str, Any]) -> dict[str, Any]:
        shortened = shorten(message, "tool_call_id")
        if calls := message.get("tool_calls"):
            shortened["tool_calls"] = [shorten(call, "id") for call in calls]
        return shortened

    def render_shortened(messages: Messages, **options: Any) -> Any:
        return renderer([shorten_all(message) for message in messages], **options)

    return render_shortened


def _with_thoughts_under(renderer: Render, key: str) -> Render:
    canonical = _THOUGHT_KEYS[0]

    def render_renamed(messages: Messages, **options: Any) -> Any:
        named = [{key if name == canonical else name: it for name, it in m.items()} for m in messages]
        return renderer(named, **options)

    return render_renamed


def find_unknown_wishes(template: Render) -> frozenset[str]:
    """Return the common reasoning options on which this template fails. Most templates ignore unknown
    variables; upstream's own renderers raise."""
    wishes = _WISHES.items()
    return frozenset(name for name, value in wishes if not attempt(template, [_USER], options={name: value}))


def opens_thoughts(template: Render, start: str) -> bool:
    """Return whether the template opens the reasoning itself if it is enabled; then the model never does."""
    return attempt(template, [_USER], options={"enable_thinking": True}).rstrip().endswith(start)


def behind_thoughts(template: Render, end: str) -> str:
    """Return the text between the end of reasoning and the answer: from rendered history, else from the empty
    reasoning that the prompt gets when thinking is off."""
    answered = attempt(template, [_USER, _ANSWER | {_THOUGHT_KEYS[0]: _THOUGHT}])
    _, found, behind = answered.rpartition(end)
    if found and _ANSWER["content"] in behind:
        return behind[: behind.index(_ANSWER["content"])]
    silent = attempt(template, [_USER], options={"enable_thinking": False})
    _, found, behind = silent.rpartition(end)
    return behind if found and not behind.strip() else ""


def render(
    template: Render,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
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
    tools: Sequence[Mapping[str, Any]] | None,
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


def probe(tokenizer: TokenizerWrapper) -> Capabilities:
    """Probe the chat template's support of late system messages, tools and thinking."""
    template = template_of(tokenizer)
    if template is None:
        return Capabilities()
    plain = attempt(template, [_USER])
    thinking, silent = (attempt(template, [_USER], options={"enable_thinking": on}) for on in (True, False))
    late = attempt(template, [_SYSTEM, _USER, _ANSWER, _LATE_SYSTEM, _LATE_USER])
    return Capabilities(
        tools="probe_tool" in attempt(template, [_USER], [_TOOL]),
        thinking=thinking != silent or bool(tokenizer.think_start and tokenizer.think_start in plain),
        system_in_place=_in_order(late, "first-question", "late-instruction", "late-question"),
    )


def _in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def rendered_calls(template: Render) -> str:
    """Render an answer with two tool calls; empty if the template cannot."""
    function = {"name": "probe_tool", "arguments": {"alpha": "one", "beta": "two"}}
    calls = [{"function": function, "id": f"abcdefgh{number}", "type": "function"} for number in range(2)]
    return attempt(template, [_USER, {"role": "assistant", "content": "", "tool_calls": calls}], [_TOOL])


def spacing_in(rendered: str) -> Callable[[str, str, str], str]:
    """Return a function (left, right, default): the white space between left and right in `rendered`."""

    def spacing(left: str, right: str, default: str) -> str:
        found = re.findall(rf"{re.escape(left)}(\s*){re.escape(right)}", rendered) if left and right else []
        return str(found[-1]) if found else default

    return spacing
