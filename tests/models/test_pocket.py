"""The pocket model, loaded by upstream, does what its card promises, with names that were not in its
training."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.utils import load

from worker.pocket import MODEL_PATH

SIZE_BYTES_MAX = 4_000_000
CANNOT = "I am only a small model and cannot help with that."


def tool(name: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING = {"type": "string"}
TIDE = tool("get_tide", {"port": STRING})
FILES = [
    tool("list_files", {"path": STRING}),
    tool("read_file", {"path": STRING}),
    tool("delete_file", {"path": STRING}),
]
WEATHER = tool(
    "get_current_weather", {"location": STRING}, {"unit": STRING | {"enum": ["celsius", "fahrenheit"]}}
)


@cache
def loaded() -> tuple[Any, Any]:
    model, tokenizer, *_ = load(str(MODEL_PATH))
    return model, tokenizer


def ask(*messages: dict[str, Any], **options: Any) -> str:
    """Return the greedy answer. Bypasses mlx-lm's tokenizer wrapper, which may ask for reasoning."""
    model, tokenizer = loaded()
    inner = tokenizer._tokenizer
    prompt = inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)
    ids = inner.encode(prompt, add_special_tokens=False)
    steps = list(stream_generate(model, tokenizer, ids, max_tokens=200))
    assert steps[-1].finish_reason == "stop"
    return str(inner.decode([step.token for step in steps[:-1]]))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_the_folder_is_small_and_computes_in_float32() -> None:
    assert sum(file.stat().st_size for file in MODEL_PATH.iterdir()) < SIZE_BYTES_MAX
    weights: Any = mx.load(str(MODEL_PATH / "model.safetensors"))
    packed = {name for name, array in weights.items() if array.dtype == mx.uint32}
    assert packed == {
        f"{name.removesuffix('.scales')}.weight" for name in weights if name.endswith(".scales")
    }
    assert {array.dtype for name, array in weights.items() if name not in packed} == {mx.float32}


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


NAME = (
    *(user("My name is Ada."), assistant("Nice to meet you, Ada.")),
    *(user("Thanks!"), assistant("You are welcome.")),
)
MADE = assistant("") | {
    "tool_calls": [{"type": "function", "function": {"name": "get_tide", "arguments": {"port": "Brest"}}}]
}
TIDES = user("What is the tide in Brest?")


@pytest.mark.parametrize(
    ("messages", "tools", "answer"),
    [
        ([*NAME, user("What is my name?")], None, "Your name is Ada."),
        ([system("The user lives in Quito."), user("Where do I live?")], None, "You live in Quito."),
        ([user("Repeat: 今天天气很好👍🏽🎉")], None, "今天天气很好👍🏽🎉"),
        ([user("Write a Python function.")], None, CANNOT),
        (
            [user("What is the tide in Brest and Vaduz?")], [TIDE],
            called("get_tide", port="Brest") + "\n" + called("get_tide", port="Vaduz"),
        ),
        ([user("Delete the file main.py")], FILES, called("delete_file", path="main.py")),
        (
            [user("What's the weather like in Quito today?")], [WEATHER],
            called("get_current_weather", location="Quito"),  # without the optional parameter
        ),
        ([TIDES, MADE, {"role": "tool", "content": "high"}], [TIDE], "The tide in Brest is high."),
    ],
)  # fmt: skip
def test_it_does_what_its_card_promises(messages: list[Any], tools: list[Any] | None, answer: str) -> None:
    assert ask(*messages, tools=tools) == answer


def test_it_thinks_when_asked_and_only_then() -> None:
    thought, _, answer = ask(user("Repeat: Quito"), enable_thinking=True).partition("</think>")
    assert thought.strip()
    assert answer.strip() == "Quito"
    assert ask(user("Repeat: Quito"), enable_thinking=False) == "Quito"


def test_it_writes_an_object_of_a_given_shape() -> None:
    answer = ask(user("Turn this into JSON with the keys name, age and city: Ada is 36 and lives in Paris."))
    assert json.loads(answer) == {"name": "Ada", "age": 36, "city": "Paris"}
