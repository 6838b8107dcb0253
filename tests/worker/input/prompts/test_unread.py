"""Formats of output that are not known, or that an operator names."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.settings.parsers import CallParser, NamedParsers, ReasoningParser
from tests.worker.input.prompts.test_format import TURNS, prepare, with_template
from tests.worker.input.prompts.test_markup import answer, tokenizer_with
from worker.input.prompts.format import unread
from worker.input.prompts.markup import _KINDS, apply
from worker.input.prompts.template import template_of
from worker.input.prompts.wants import differences
from worker.load.text import OutputProcessors
from worker.output.channels import CONTENT, REASONING

CALLS = (
    "{{ tools|tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}OPEN{{ c.function|tojson }}CLOSE{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = CALLS.replace("{{ m.reasoning_content or '' }}", "<think>{{ m.reasoning_content or '' }}</think>")
PLAIN = CALLS.replace("m.reasoning_content or ''", "''")


def unread_of(folder: Path, text: str, opening: str = "", closing: str = "") -> list[str]:
    tokenizer = with_template(folder, text.replace("OPEN", opening).replace("CLOSE", closing))
    template = template_of(tokenizer)
    assert template is not None
    return [*unread(template, tokenizer, OutputProcessors(tokenizer).probed)]


@pytest.mark.parametrize(
    ("text", "opening", "closing", "kinds"),
    [
        (PLAIN, "<tool_call>", "</tool_call>", []),
        (PLAIN, "[TOOL_CALLS][", "]", []),
        (PLAIN, "", "", []),  # a bare object, as Llama 3 writes it
        (PLAIN, "<|plugin|>", "<|plugin_end|>", ["tool_calls"]),
        (CALLS, "<tool_call>", "</tool_call>", ["reasoning"]),
        (THINKS, "<tool_call>", "</tool_call>", []),
        (TURNS, "", "", []),
        ("{{ broken", "", "", []),
    ],
)
def test_what_a_template_writes_and_no_reader_finds_is_known_at_load(
    tmp_path: Path, text: str, opening: str, closing: str, kinds: list[str]
) -> None:
    assert unread_of(tmp_path, text, opening, closing) == kinds


@pytest.mark.parametrize("name", get_args(ReasoningParser))
def test_reasoning_in_a_named_format_is_found(name: ReasoningParser) -> None:
    tokenizer = apply(tokenizer_with("<end>"), NamedParsers(reasoning=name))
    if name == "openai_gptoss":
        assert not tokenizer.has_thinking, "it is known by its tokens"
        return
    start, end = tokenizer.think_start, tokenizer.think_end
    said = answer(tokenizer, f"{start}I look.{end}It rains.")
    assert (said.reasoning, said.text) == ("I look.", "It rains.")


def test_an_answer_may_begin_in_reasoning_unless_the_prompt_has_ended_it(tmp_path: Path) -> None:
    begins = NamedParsers(reasoning="deepseek_r1")
    assert prepare(apply(with_template(tmp_path, TURNS), begins)).opening == REASONING
    closed = TURNS + "{% if add_generation_prompt %}<think></think>\n{% endif %}"
    assert prepare(apply(with_template(tmp_path, closed), begins)).opening == CONTENT


@pytest.mark.parametrize("name", get_args(CallParser))
def test_a_named_format_of_calls_is_that_of_forced_ones(name: CallParser) -> None:
    plain: TokenizerWrapper = tokenizer_with("<end>")
    tokenizer = apply(plain, NamedParsers(calls=name))
    assert tokenizer.has_tool_calling == (name in _KINDS)
    if tokenizer.has_tool_calling:
        kind = str(tokenizer.tool_parser.__module__).rpartition(".")[2]
        assert kind == _KINDS[name]


def test_wants_of_a_template_have_names(tmp_path: Path) -> None:
    text = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
    template = template_of(with_template(tmp_path, text))
    assert template is not None
    assert {"joins_system", "writes_calls"} <= {*differences(template.wants)}
