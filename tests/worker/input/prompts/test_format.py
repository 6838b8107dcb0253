"""Output formats: the channel in which an answer begins, and how reasoning is closed by force."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import Code, RequestError
from tests.factories import request
from tests.models.fixtures import model_folder
from worker.input.prompts.format import closing_of
from worker.input.prompts.prompt import PromptRules, TextPreparer, open_tokenizer
from worker.input.prompts.template import template_of
from worker.output.channels import CONTENT, REASONING
from worker.pocket import MODEL_PATH
from worker.values import EngineRequest, SamplingParams, ThinkingBudget

RULES = PromptRules(context_length=1000, vocabulary=2048, defaults=SamplingParams())
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CLOSED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"


def user(text: str = "Hello!") -> dict[str, Any]:
    return {"role": "user", "content": text}


def with_template(folder: Path, template: str | None) -> TokenizerWrapper:
    """Return the dense model's tokenizer with another chat template, or with none."""
    for file in model_folder("dense").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return open_tokenizer(folder, [])


def prepare(tokenizer: TokenizerWrapper, text: str = "Hello!", **fields: Any) -> EngineRequest:
    said = {"messages": [user(text)]} | fields
    return TextPreparer(tokenizer, RULES).prepare(request(**said), ())


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (TURNS, CONTENT),
        (TURNS + OPENING, REASONING),
        (TURNS + CLOSED, CONTENT),
        ("{{ messages[0].content }}<think>\n", REASONING),  # whether or not it is to reason
    ],
)
def test_an_answer_begins_in_the_thought_of_its_template(tmp_path: Path, template: str, opening: str) -> None:
    tokenizer = with_template(tmp_path, template)
    for text in ("Hello!", "What does </think> mean?", "What does <think> mean?", "</think><think>\n"):
        assert prepare(tokenizer, text).opening == opening


@pytest.mark.parametrize(
    ("behind", "end"),
    [
        ("<|vision_end|>\n", "<|vision_end|>"),
        ("<|vision_end|><|im_end|>", "<|im_end|>"),  # a listed end among them
        ("</think>", "<|im_end|>"),  # no special token
        ("", "<|im_end|>"),
    ],
)
def test_an_end_of_turn_ends_answers_if_nothing_lists_it(tmp_path: Path, behind: str, end: str) -> None:
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}")
    ends = prepare(tokenizer).end_tokens
    assert (tokenizer.convert_tokens_to_ids(end) in ends, len(ends)) == (True, 1 + (end != "<|im_end|>"))


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_of_the_history_stand_where_the_template_looks_for_them(tmp_path: Path, key: str) -> None:
    template = "{% for m in messages %}{{ m.get('" + key + "') or '' }}|{{ m.content }};{% endfor %}"
    tokenizer = with_template(tmp_path, template)
    messages = [user("Q"), {"role": "assistant", "content": "A", "reasoning_content": "Hm"}, user("R")]
    engine_request = prepare(tokenizer, messages=messages)
    assert tokenizer.decode(list(engine_request.tokens)) == "|Q;Hm|A;|R;"


@pytest.mark.parametrize(
    ("template", "closing"),
    [
        (TURNS + OPENING, "</think>"),
        (TURNS + CLOSED, "</think>\n\n"),
        (TURNS.replace("{{ m.content", "{{ m.reasoning_content }}</think>\n{{ m.content"), "</think>\n"),
    ],
)
def test_closing_is_found_in_history_or_empty_reasoning(tmp_path: Path, template: str, closing: str) -> None:
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.decode(list(closing_of(tokenizer, template_of(tokenizer)))) == closing


def test_a_budget_becomes_part_of_how_the_row_is_drawn() -> None:
    tokenizer = open_tokenizer(MODEL_PATH, [])
    closing = closing_of(tokenizer, template_of(tokenizer))
    assert tokenizer.decode(list(closing)) == "</think>\n\n"
    for thinks in (True, False):
        engine_request = prepare(tokenizer, thinking_budget=5, template_kwargs={"enable_thinking": thinks})
        opening = tuple(tokenizer.encode("<think>", add_special_tokens=False))
        assert engine_request.sampling.thinking_budget == ThinkingBudget(5, opening, closing, is_open=thinks)
    assert prepare(tokenizer).sampling.thinking_budget is None
    assert prepare(tokenizer, messages=None, prompt="x", thinking_budget=5).sampling.thinking_budget is None


def test_a_budget_is_refused_where_no_token_ends_a_thought(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    tokenizer._think_end_tokens = None
    with pytest.raises(RequestError) as caught:
        prepare(tokenizer, thinking_budget=5)
    assert (caught.value.code, caught.value.param) == (Code.UNSUPPORTED_PARAMETER, "thinking_budget")


MISTRAL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id is undefined or c.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[{{ c.function.name }}:{{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "({{ m.tool_call_id }}){% endif %}{{ m.content }};{% endfor %}"
)


def calling(*ids: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": {}}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": "r"} for id in ids]
    return [user("Q"), {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def test_a_template_that_takes_its_own_ids_alone_is_given_such(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, MISTRAL)
    ids = ["call_" + "0" * 24, "call_" + "1" * 24, "abcdefgh9"]
    messages = calling(*ids)
    engine_request = prepare(tokenizer, messages=messages)
    text = tokenizer.decode(list(engine_request.tokens))
    found = re.findall(r"\[f:([a-z0-9]{9})\]", text)
    assert re.findall(r"\(([a-z0-9]{9})\)", text) == found
    assert len({*found}) == 3
    assert found[2] == "abcdefgh9"
    assert messages == calling(*ids)
    assert prepare(tokenizer, messages=messages).tokens == engine_request.tokens
