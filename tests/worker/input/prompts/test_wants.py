"""What templates want of messages: excerpts of published ones, each with the construct that others lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.dialects.normalize import normalize
from tests.worker.input.prompts.test_format import with_template
from worker.input.prompts.template import TEMPLATE_ERRORS, Template, reason_of, render, template_of
from worker.input.prompts.wants import Wants, lay_out

ENDS = "{% if add_generation_prompt %}<A>{% endif %}"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + ENDS
DEEPSEEK_R1 = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '<out>' + m.content }}"
    "{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}" + ENDS
)
DEEPSEEK_V3 = DEEPSEEK_R1.replace("m.role == 'assistant' and m.tool_calls", "m.content is none")
QWEN_3 = DEEPSEEK_R1.replace(
    "c.function.arguments }}",
    "(c.function.arguments if c.function.arguments is string else c.function.arguments|tojson) }}",
)
KIMI = TURNS.replace(">{{", ">{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{{")
QWEN_CODER = (
    "{{ tools|tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments|items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}"
    "</function>{% endfor %}{% endfor %}" + ENDS
)
GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}" + ENDS
)
LLAMA_3 = (
    "{{ tools|tojson if tools }}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls|length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}"
    "<call>{{ m.tool_calls[0].function|tojson }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}" + ENDS
)
MISTRAL = (
    "{{ tools|tojson if tools }}{% set ns = namespace(before='') %}{% for m in messages %}"
    "{% if ns.before == 'tool' and m.role == 'user' %}{{ raise_exception('they alternate') }}{% endif %}"
    "{% set ns.before = m.role %}{% if m.tool_call_id and m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}" + ENDS
)
QWEN_3_5 = (
    "{{ tools|tojson if tools }}{% if not messages|selectattr('role', 'equalto', 'user')|list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}" + ENDS
)
EFFORTS = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('reasoning_effort must be none or high') }}{% endif %}{{ reasoning_effort }}" + TURNS
)
THINKING = TURNS + "{{ '<think>' if thinking else '</think>' }}"

ANY_TOOL = [{"type": "function", "function": {"name": "run"}}]


def user(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def calls(*arguments: str, content: str | None = None) -> dict[str, Any]:
    called = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "run", "arguments": text}}
        for number, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": called}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


ONE = [user("list"), calls('{"command": "ls"}'), result(0, "two files")]


def template(folder: Path, text: str) -> Template:
    found = template_of(with_template(folder, text))
    assert found is not None
    return found


def rendered(folder: Path, text: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the prompt of a conversation that a client has sent, with the call's tool."""
    return render(template(folder, text), normalize(messages).messages, ANY_TOOL, options)


@pytest.mark.parametrize(
    ("text", "messages", "prompt"),
    [
        (DEEPSEEK_R1, ONE, 'run<user>list<call>run {"command": "ls"}<out>two files<A>'),
        (KIMI, ONE, "<user>list<assistant>functions.run:0<tool>functions.run:0two files<A>"),
        (DEEPSEEK_V3, ONE, 'run<user>list<call>run {"command": "ls"}<out>two files<A>'),
        (
            DEEPSEEK_V3,
            [user("list"), calls('{"command": "ls"}', content="Yes."), result(0, "two files")],
            'run<user>list<assistant>Yes.<call>run {"command": "ls"}<out>two files<A>',
        ),
    ],
)
def test_calls_are_in_the_prompt_whatever_the_template_reads_them_from(
    tmp_path: Path, text: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert rendered(tmp_path, text, messages) == prompt


@pytest.mark.parametrize(
    ("arguments", "members"),
    [
        ('{"command": "ls"}', {"command": "ls"}),
        (json.dumps('{"command": "ls"}'), {"command": "ls"}),
        ("", {}),
        ('{"a": 1, "b": [true, {"c": "l', {"a": 1, "b": [True, {"c": "l"}]}),
        ('{"a": "l", "b": 12', {"a": "l"}),
        ('{"a": "l\\', {"a": "l"}),
        ('{"a": "l\\ud83d\\ude', {"a": "l"}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"n": 123456789012345678901234567890}', {"n": "123456789012345678901234567890"}),
        ('{"n": 1e999, "m": [-Infinity, NaN]}', {"n": "1e999", "m": ["-Infinity", "NaN"]}),
        *(
            (text, {"arguments": text})
            for text in ("null", "[]", '["ls"]', "{oops", '{"a": 1} and', "1", '{"a": x')
        ),
    ],
)
def test_arguments_are_text_or_best_objects(tmp_path: Path, arguments: str, members: dict[str, Any]) -> None:
    is_object = arguments == "" or "ls" in members.values()
    as_text = json.dumps(members) if is_object else arguments
    pairs = "".join(f"<parameter={key}>{value}</parameter>" for key, value in members.items())
    hermes = '<tool_call>{"name": "run", "arguments": ' + as_text + "}</tool_call>"
    for text, written in (
        (QWEN_CODER, f"<function=run>{pairs}</function>"),
        (QWEN_3, f"<call>run {as_text}"),
        (DEEPSEEK_R1, f"<call>run {as_text}"),
        (LLAMA_3, '"arguments": ' + json.dumps(members, ensure_ascii=False)),
        (GEMMA_2, hermes),
    ):
        prompt = rendered(tmp_path, text, [user("list"), calls(arguments), result(0, "two files")])
        assert written in prompt


@pytest.mark.parametrize("role", ["system", "developer"])
def test_without_a_system_role_its_text_comes_before_the_first_question(tmp_path: Path, role: str) -> None:
    messages = [user("Be terse.", role), user("hello"), user("Hi.", "assistant"), user("again")]
    prompt = render(template(tmp_path, GEMMA_2), normalize(messages).messages)
    assert prompt == "<user>Be terse.\n\nhello<assistant>Hi.<user>again<A>"


def test_a_template_without_calls_has_them_as_text(tmp_path: Path) -> None:
    prompt = rendered(tmp_path, GEMMA_2, [user("Be terse.", "system"), *ONE, user("And now?")])
    assert prompt.startswith("<user>Be terse.\n\nlist<assistant>")
    call = '<assistant><tool_call>{"name": "run", "arguments": {"command": "ls"}}</tool_call>'
    assert f"{call}<user><tool_response>two files</tool_response>\nAnd now?<A>" in prompt


def test_parts_are_joined_as_texts_are() -> None:
    image = {"type": "image"}
    asked = [user("Be terse.", "system"), {"role": "user", "content": [image]}]
    shown = lay_out(asked, Wants(joins_system=True))
    assert shown == [{"role": "user", "content": [{"type": "text", "text": "Be terse.\n\n"}, image]}]
    looked = [{"role": "tool", "content": [image]}, user("And?")]
    [spoken] = lay_out(looked, Wants(writes_calls=True))
    texts = [part.get("text", "<image>") for part in spoken["content"]]
    assert "".join(texts) == "<tool_response><image></tool_response>\nAnd?"
    alone = lay_out([user("Be terse.", "system")], Wants(joins_system=True))
    assert alone == [user("Be terse.")]


def test_a_system_message_between_does_not_hide_that_a_turn_is_missing() -> None:
    late = user("The date has changed.", "system")
    for before in (result(0, "aborted"), user("First.")):
        laid = lay_out([before, late, user("And now?")], Wants(between=""))
        assert [each["role"] for each in laid] == [before["role"], "system", "assistant", "user"]


def test_of_several_calls_each_has_a_message_where_a_template_takes_one(tmp_path: Path) -> None:
    both = calls('{"command": "ls"}', '{"command": "pwd"}')
    in_order = [user("list"), both, result(0, "two files"), result(1, "/home")]
    prompt = rendered(tmp_path, LLAMA_3, in_order)
    first, second = prompt.index('"ls"'), prompt.index('"pwd"')
    assert first < prompt.index("<tool>two files") < second < prompt.index("<tool>/home")
    swapped = [user("list"), both, result(1, "/home"), result(0, "two files")]
    assert rendered(tmp_path, LLAMA_3, swapped) == prompt
    assert rendered(tmp_path, LLAMA_3, [user("list"), both, result(1, "/home")]).count("<call>") == 2


def test_ids_and_turns_are_as_mistral_wants_them(tmp_path: Path) -> None:
    prompt = rendered(tmp_path, MISTRAL, [*ONE, user("stop")])
    assert prompt.endswith("<tool>two files<assistant><user>stop<A>")


def test_a_history_without_a_question_gets_an_empty_one_where_a_template_needs_it(tmp_path: Path) -> None:
    prompt = rendered(tmp_path, QWEN_3_5, [user("summary", "system"), *ONE[1:]])
    assert "<system>summary<user><assistant>" in prompt
    assert "<user><assistant>" not in rendered(tmp_path, QWEN_3_5, [user("Hi.", "assistant"), user("hello")])


@pytest.mark.parametrize(
    ("asked", "given"),
    [("none", "none"), ("minimal", "high"), ("low", "high"), ("medium", "high"), ("xhigh", "high")],
)
def test_an_effort_unknown_to_a_template_becomes_the_nearest(tmp_path: Path, asked: str, given: str) -> None:
    prompt = render(template(tmp_path, EFFORTS), [user("hello")], None, {"reasoning_effort": asked})
    assert prompt == f"{given}<user>hello<A>"


def test_thinking_is_switched_by_the_name_that_the_template_reads(tmp_path: Path) -> None:
    found = template(tmp_path, THINKING)
    assert render(found, [user("hello")], None, {"enable_thinking": True}).endswith("<think>")
    assert render(found, [user("hello")], None, {"enable_thinking": False}).endswith("</think>")
    both = {"enable_thinking": True, "thinking": False}  # a client that knows its template
    assert render(found, [user("hello")], None, both).endswith("</think>")


def test_a_template_that_wants_nothing_special_gets_the_canonical_form(tmp_path: Path) -> None:
    messages = normalize([user("Be terse.", "system"), *ONE]).messages
    found = template(tmp_path, QWEN_CODER)
    given: list[Any] = []

    def taken(messages: Any, **options: Any) -> str:
        given.append((messages, options))
        return ""

    found._renderer = taken
    found._in_layout(found.wants)(messages, tools=None)
    assert given == [(messages, {"tools": None})]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError"),
        ("{{ unknown_macro(messages) }}", "UndefinedError"),
        ("Hello!", "does not write what the user says"),
    ],
)
def test_a_broken_template_is_known_by_its_own_error(tmp_path: Path, text: str, says: str) -> None:
    assert says in template(tmp_path, text).problem
    assert template(tmp_path, TURNS).problem == ""


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("{{ raise_exception('No one may say x.') }}", "No one may say x."),
        ("{{ 'x' + 1 }}", 'TypeError: can only concatenate str (not "int") to str.'),
    ],
)
def test_a_refusal_is_told_from_a_fault_of_the_template(tmp_path: Path, condition: str, says: str) -> None:
    found = template(tmp_path, "{% if messages[-1].content == 'x' %}" + condition + "{% endif %}" + TURNS)
    with pytest.raises(TEMPLATE_ERRORS) as caught:
        render(found, [user("x")])
    assert reason_of(caught.value).startswith(says)
    assert ("fault is the template's" in reason_of(caught.value)) == ("TypeError" in says)
