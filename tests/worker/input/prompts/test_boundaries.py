"""Prompt boundaries: where later prompts diverge by the template, compared with actual later prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from tests import factories
from tests.factories import request
from worker.input.prompts.boundaries import GAP_MIN, RenderedPrompt
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.pocket import MODEL_PATH
from worker.values import EngineRequest, SamplingParams

Message = dict[str, Any]
RULES = PromptRules(context_length=100_000, vocabulary=2000, defaults=SamplingParams())

# Small templates modelled on well-known ones, with the added tokens that each of them uses.

_LLAMA = """
{{- '<|begin|><|header|>system<|end_header|>\n\nToday: ' ~ strftime_now('%d %b %Y') ~ '\n\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content | trim -}}{%- endif -%}
{%- for tool in tools or [] -%}{{- '\n\n' ~ (tool | tojson) -}}{%- endfor -%}
{{- '<|eot|>' -}}
{%- for message in messages if message.role != 'system' -%}
    {%- set role = 'ipython' if message.role == 'tool' else message.role -%}
    {{- '<|header|>' ~ role ~ '<|end_header|>\n\n' -}}
    {{- message.tool_calls[0].function | tojson if message.tool_calls else message.content | trim -}}
    {{- '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant<|end_header|>\n\n' -}}{%- endif -%}
"""

_MISTRAL = """
{%- set turn = namespace(count=0, last=0) -%}
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls -%}
        {%- if (message.role == 'user') != (turn.count % 2 == 0) -%}
            {{- raise_exception('Roles must alternate.') -}}
        {%- endif -%}
        {%- set turn.count = turn.count + 1 -%}
    {%- endif -%}
    {%- if message.role == 'user' -%}{%- set turn.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<s>' -}}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'user' -%}
        {%- if loop.index0 == turn.last and tools -%}
            {{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' ~ (system if loop.index0 == turn.last else '') ~ message.content ~ '[/INST]' -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]' ~ message.content ~ '[/TOOL_RESULTS]' -}}
    {%- elif message.tool_calls -%}
        {{- '[TOOL_CALLS]' ~ (message.tool_calls | tojson) ~ '</s>' -}}
    {%- else -%}
        {{- message.content ~ '</s>' -}}
    {%- endif -%}
{%- endfor -%}
"""

_GEMMA = """
{{- '<bos>' -}}
{%- for message in messages -%}
    {%- if message.role not in ('user', 'assistant') -%}
        {{- raise_exception('There is no role ' ~ message.role) -}}
    {%- endif -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate.') -}}
    {%- endif -%}
    {{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else 'user') ~ '\n' -}}
    {{- (message.content | trim) ~ '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

_THINKER = """
{%- for tool in tools or [] -%}{{- '<|im_start|>tool\n' ~ (tool | tojson) ~ '<|im_end|>\n' -}}{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' -}}
    {%- set answer = message.content.split('</think>')[-1].lstrip('\n') -%}
    {{- answer if message.role == 'assistant' else message.content -}}
    {%- for call in message.tool_calls or [] -%}{{- '<tool_call>' ~ (call.function | tojson) -}}{%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""


TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": (_LLAMA, ("<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>")),
    "mistral": (_MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")),
    "gemma": (_GEMMA, ()),  # nowhere to split: whole renderings are compared
    "thinker": (_THINKER, ()),
}

TALKATIVE = ["pocket", "llama", "mistral", "gemma", "thinker"]
WITH_TOOLS = ["pocket", "llama", "mistral", "thinker"]
SYSTEM_FIRST = ["pocket", "llama", "thinker"]
"""Templates whose system prompt and tools stay at the beginning throughout the conversation."""

SYSTEM = "You are a patient assistant in a harbour office. Answer briefly, and in the language of the user."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "When the tide is high.",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}


@cache
def tokenizer(template: str) -> TokenizerWrapper:
    wrapper = open_tokenizer(MODEL_PATH, [])
    if template in TEMPLATES:
        wrapper._tokenizer.chat_template, added = TEMPLATES[template]
        wrapper._tokenizer.add_tokens(list(added), special_tokens=True)
    return wrapper


@cache
def preparer(template: str) -> TextPreparer:
    return TextPreparer(tokenizer(template), RULES)


def prepare(template: str, messages: Sequence[Message], **fields: Any) -> EngineRequest:
    return preparer(template).prepare(request(messages=messages, **fields), ())


def check_ends(template: str, engine_request: EngineRequest, *ends: str) -> None:
    """Check that there is a boundary after each of `ends`, and no other."""
    decode = tokenizer(template).decode
    found = [str(decode(list(engine_request.tokens[:place]))) for place in engine_request.boundaries]
    assert [text[-len(end) :] for text, end in zip(found, ends, strict=True)] == list(ends)


def system(content: str = SYSTEM) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(port: str, **more: Any) -> Message:
    function = {"name": "get_tide", "arguments": {"port": port}}
    return assistant("", tool_calls=[{"id": "call12345", "type": "function", "function": function}], **more)


def result(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "call12345", "content": content}


def common(first: EngineRequest, second: EngineRequest) -> int:
    """Return the length of two prompts' common prefix in tokens."""
    pairs = zip(first.tokens, second.tokens, strict=False)
    least = min(len(first.tokens), len(second.tokens))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), least)


# --- positions -----------------------------------------------------------------------------------------

LONG = "When is the tide high in the harbour of the small town on the other side of the bay?"


def test_an_agents_prompt_is_shared_up_to_its_tools_its_last_question_and_its_end() -> None:
    messages = [system(), user("Hello!"), assistant("What can I do for you? " * 3 + "Ask!"), user(LONG)]
    check_ends(
        "pocket",
        prepare("pocket", messages, tools=[TOOL]),
        "</tool_call><|im_end|>\n<|im_start|>user",
        "Ask!<|im_end|>\n<|im_start|>user",
        "bay?<|im_end|>\n<|im_start|>assistant",
    )


def test_a_prompt_without_system_and_tools_is_shared_up_to_its_end() -> None:
    end = "bay?<|im_end|>\n<|im_start|>assistant"
    check_ends("pocket", prepare("pocket", [user(LONG)]), end)
    grows = assistant("It is high at noon, and again at midnight. " * 3)  # an answer at the end
    check_ends("pocket", prepare("pocket", [user(LONG), grows]), end)
    short = prepare("pocket", [user("Hello!")], cache_salt="tenant", cache_pin=True)
    assert (short.boundaries, short.salt, short.pin) == ((), "tenant", True)
    assert preparer("pocket").prepare(request(prompt=LONG), ()).boundaries == ()


def test_thoughts_that_are_dropped_later_are_behind_one_boundary_and_before_another() -> None:
    hidden = "The user wants the tide, so the tool has to be asked. " * 2
    messages = [system(), user(LONG), call("Ostend", reasoning_content=hidden), result("At noon. " * 12)]
    check_ends(
        "pocket",
        prepare("pocket", messages, tools=[TOOL], template_kwargs={"enable_thinking": True}),
        "</tool_call><|im_end|>\n<|im_start|>user",  # another conversation
        "bay?<|im_end|>\n<|im_start|>assistant\n",  # an answer and a question, which drop the reasoning
        "</tool_response><|im_end|>\n<|im_start|>assistant",  # another call, which keeps it
    )


def test_tools_that_move_to_the_last_question_are_left_out_where_they_move() -> None:
    first = prepare("mistral", [system(), user(LONG)], tools=[TOOL])
    # Another conversation; a call. With an answer and a question the system prompt moves as well.
    check_ends("mistral", first, "of the user.\n\n", "side of the bay?")
    later = prepare("mistral", [user(LONG), assistant("At noon. " * 9 + "Ha!"), user(LONG)], tools=[TOOL])
    # An answer and a question, which remove the tools; an edit of this question; a call.
    check_ends("mistral", later, "Ha!</s>", "[/AVAILABLE_TOOLS][INST]", "side of the bay?")


# --- the guarantee -------------------------------------------------------------------------------------

# Difficult at a boundary: line breaks and blanks, which merge with the template's own; partly common
# beginnings; combining characters, which normalization merges; the template's own words.
_AWKWARD = (
    "\n", "\n\n", " ", "x", "y", "\u0301", "é", "。", "🧑🏽‍🚀", "</think>", "<think>", "<|im_end|>", "[INST]"
)  # fmt: skip
_texts = st.lists(
    st.one_of(st.sampled_from(_AWKWARD), st.sampled_from(LONG.split()), st.text(max_size=3)), max_size=12
).map(" ".join)
_questions = _texts.map(user)
_answers = _texts.map(assistant)
_thoughts = st.one_of(st.just({}), _texts.map(lambda text: {"reasoning_content": text}))
_calls = st.builds(lambda text, more, found: [call(text, **more), result(found)], _texts, _thoughts, _texts)


@st.composite
def conversations(draw: st.DrawFn, template: str) -> tuple[list[Message], dict[str, Any]]:
    """Draw a conversation up to a question or a tool result, and the request's other fields."""
    tools = [TOOL] if template in WITH_TOOLS and draw(st.booleans()) else None
    messages = [system(draw(_texts))] if template != "gemma" and draw(st.booleans()) else []

    def ask() -> None:
        messages.append(draw(_questions))
        for steps in draw(st.lists(_calls, max_size=2)) if tools else []:
            messages.extend(steps)

    ask()
    for answer in draw(st.lists(_answers, max_size=2)):
        messages.append(answer)
        ask()
    thinking = draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    return messages, {"tools": tools, "template_kwargs": thinking}


SLACK = GAP_MIN + 8
"""Tokens that the next prompt may share beyond the best boundary: a boundary omitted as too near, and tokens
before the first one that cannot grow."""


@pytest.mark.parametrize("template", TALKATIVE)
@given(data=st.data())
@settings(max_examples=25)
def test_the_next_prompt_and_an_edited_one_share_a_boundary(template: str, data: st.DataObject) -> None:
    messages, fields = data.draw(conversations(template))
    engine_request = prepare(template, messages, **fields)
    called = fields["tools"] is not None and data.draw(st.booleans())
    more = data.draw(_calls) if called else [data.draw(_answers), data.draw(_questions)]
    shared = common(engine_request, prepare(template, [*messages, *more], **fields))
    boundaries = engine_request.boundaries
    assert shared - max((b for b in boundaries if b <= shared), default=0) < SLACK
    marks = [0, *boundaries]
    assert len(marks) <= 5
    assert all(later - earlier >= GAP_MIN for earlier, later in pairwise(marks))
    assert marks[-1] < len(engine_request.tokens)
    while messages[-1]["role"] != "user":
        messages.pop()
    engine_request = prepare(template, messages, **fields)
    edited = prepare(template, [*messages[:-1], user("Another question altogether")], **fields)
    near = common(engine_request, edited)
    assert near - max((b for b in engine_request.boundaries if b <= near), default=0) < SLACK
    # Some boundaries are for other continuations: a call, or (Mistral moves the system prompt) another
    # conversation.
    if called or not (fields["tools"] or template == "mistral"):
        assert max(boundaries, default=0) <= shared


@pytest.mark.parametrize("template", SYSTEM_FIRST)
@given(data=st.data())
@settings(max_examples=25)
def test_another_conversation_shares_the_first_boundary(template: str, data: st.DataObject) -> None:
    (one, fields), (other, _) = data.draw(conversations(template)), data.draw(conversations(template))
    one, other = ([system(), *(m for m in messages if m["role"] != "system")] for messages in (one, other))
    engine_request = prepare(template, one, **fields)
    first = engine_request.boundaries[0]
    assert first <= common(engine_request, prepare(template, other, **fields))
    bare = prepare(template, [system(), user("")], **fields)
    assert len(bare.tokens) - first < 2 * GAP_MIN


# --- comparison of renderings --------------------------------------------------------------------------


def prompt(template: str, text: str, *, split: bool = True, spy: list[int] | None = None) -> RenderedPrompt:
    wrapper = tokenizer(template)

    def encode(part: str) -> list[int]:
        if spy is not None:
            spy.append(len(part))
        return list(wrapper.encode(part, add_special_tokens=False))

    added = {token: str(mark) for token, mark in wrapper.added_tokens_decoder.items()} if split else {}
    return RenderedPrompt(text, wrapper.encode(text, add_special_tokens=False), added, encode)


@pytest.mark.parametrize("template", ["pocket", "mistral"])
@given(shared=_texts, ours=_texts, theirs=_texts)
@settings(max_examples=50)
def test_tokenizing_the_end_finds_what_all_finds(template: str, shared: str, ours: str, theirs: str) -> None:
    text, other = shared + ours, shared + theirs
    whole = prompt(template, text, split=False).shared_with(other)
    assert prompt(template, text).shared_with(other) == whole
    requests = (factories.engine_request(tokens=prompt(template, each).tokens) for each in (text, other))
    assert whole == common(*requests)


def test_of_a_long_conversation_only_the_end_is_tokenized_again() -> None:
    turns = "".join(f"<|im_start|>user\n{LONG}<|im_end|>\n" for _ in range(200))
    tokenized: list[int] = []
    whole = prompt("pocket", turns + "<|im_start|>assistant\n", spy=tokenized)
    assert whole.shared_with(turns + "something else") == len(prompt("pocket", turns).tokens)
    assert sum(tokenized) < 50
