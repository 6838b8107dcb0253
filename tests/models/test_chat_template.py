"""Rendering of each shape of conversation by the chat template, through transformers' own renderer."""

from __future__ import annotations

from functools import cache
from typing import Any

from mlx_lm.utils import load_tokenizer

from tests.models.fixtures import model_folder

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@cache
def tokenizer() -> Any:
    return load_tokenizer(model_folder("dense"))


def render(*messages: dict[str, Any], prompt: bool = False, **options: Any) -> str:
    text = tokenizer().apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **options
    )
    return str(text)


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content}


HI = "<|im_start|>user\nHi<|im_end|>\n"


def test_turns_are_rendered_in_order() -> None:
    rendered = render(system("Be brief."), user(), assistant("Hello"), user())
    head = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert rendered == head + HI + "<|im_start|>assistant\nHello<|im_end|>\n" + HI
    late = "<|im_start|>system\nNow in French.<|im_end|>\n"
    assert render(user(), system("Now in French."), user()) == HI + late + HI


def test_the_generation_prompt_leaves_thinking_to_the_model_or_closes_it() -> None:
    assert render(user(), prompt=True) == HI + "<|im_start|>assistant\n"
    assert render(user(), prompt=True, enable_thinking=True) == HI + "<|im_start|>assistant\n"
    closed = HI + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(user(), prompt=True, enable_thinking=False) == closed


def test_tools_are_listed_as_json_under_the_system_message() -> None:
    rendered = render(system("Be brief."), user(), tools=[TOOL, TOOL])
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    line = '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}'
    assert f"<tools>\n{line}\n{line}\n</tools>\n" in rendered
    assert rendered.endswith("</tool_call><|im_end|>\n" + HI)
    assert render(user(), tools=[TOOL]).startswith("<|im_start|>system\n# Tools\n")


def test_tool_calls_are_rendered_as_they_are_to_be_written() -> None:
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    as_text = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    turn = "<|im_start|>assistant\n"
    assert render(assistant(tool_calls=[CALL])) == f"{turn}{written}<|im_end|>\n"
    assert render(assistant(None, tool_calls=[as_text])) == f"{turn}{written}<|im_end|>\n"
    inner = written.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert tokenizer().tool_parser(inner) == CALL["function"]
    both = render(assistant("Let me see.", tool_calls=[CALL, CALL]))
    assert both == f"{turn}Let me see.\n{written}\n{written}<|im_end|>\n"


def test_neighbouring_tool_results_share_a_user_turn() -> None:
    rendered = render(user(), assistant(tool_calls=[CALL, CALL]), result("sunny"), result({"c": 20}), user())
    merged = (
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"
        '\n<tool_response>\n{"c": 20}\n</tool_response><|im_end|>\n'
    )
    assert rendered.endswith("</tool_call><|im_end|>\n" + merged + HI)
    apart = render(user(), result("a"), assistant("b"), result("c"))
    assert apart.count("<|im_start|>user\n<tool_response>") == 2


def test_reasoning_is_kept_only_after_the_last_question() -> None:
    thinking = assistant("Yes.", reasoning_content="Hm.")
    kept = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"
    dropped = "<|im_start|>assistant\nYes.<|im_end|>\n"
    assert render(user(), thinking) == HI + kept
    assert render(user(), thinking, user()) == HI + dropped + HI
    inside = assistant("<think>\nHm.\n</think>\n\nYes.")
    assert render(user(), inside, user()) == HI + dropped + HI
    assert render(user(), inside) == HI + kept
    assert render(user(), thinking, result("x"), thinking).count("<think>\nHm.\n</think>") == 2
