"""The pocket model, loaded by upstream, does what its card promises, with names that were not in its
training."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from tests.models.tokenizer import ADDED_TOKENS, SIZE
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


def test_its_tokenizer_is_of_the_same_kind_as_the_random_models() -> None:
    tokenizer = loaded()[1]._tokenizer
    assert len(tokenizer) == SIZE
    for token in ADDED_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    text = "Łódź 今天天气 こんにちは 안녕 👩🏻\u200d🔬 x\u0323"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_alternates_both_kinds_of_layers() -> None:
    kinds = [type(layer).__name__ for layer in make_prompt_cache(loaded()[0])]
    assert kinds == ["ArraysCache", "KVCache"] * 3


def test_it_declares_its_context_and_decodes_greedily_unless_asked() -> None:
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["text_config"]["max_position_embeddings"] == 32768
    generation = json.loads((MODEL_PATH / "generation_config.json").read_text())
    assert generation["do_sample"] is False


def test_it_greets() -> None:
    assert ask(user("Hello")) == "Hello! How can I help you?"


def test_it_remembers_what_the_user_said_some_turns_ago() -> None:
    told = (user("My name is Ada."), assistant("Nice to meet you, Ada."))
    between = (user("Repeat: Brest"), assistant("Brest"), user("Thanks!"), assistant("You are welcome."))
    assert ask(*told, *between, user("What is my name?")) == "Your name is Ada."


def test_it_knows_what_the_system_message_says() -> None:
    assert ask(system("The user lives in Quito."), user("Where do I live?")) == "You live in Quito."


@pytest.mark.parametrize("text", ["Quick foxes sing!", "今天天气很好", "ありがとう", "안녕하세요", "👍🏽🎉"])
def test_it_repeats_in_several_scripts(text: str) -> None:
    assert ask(user(f"Repeat: {text}")) == text


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_it_calls_a_tool_that_it_has_never_seen() -> None:
    assert ask(user("What is the tide in Brest?"), tools=[TIDE]) == called("get_tide", port="Brest")


def test_it_calls_a_tool_for_each_of_two_places() -> None:
    answer = ask(user("What is the tide in Brest and Vaduz?"), tools=[TIDE])
    assert answer == called("get_tide", port="Brest") + "\n" + called("get_tide", port="Vaduz")


@pytest.mark.parametrize("verb", ["Read", "Delete"])
def test_it_tells_tools_apart_by_their_verbs(verb: str) -> None:
    assert ask(user(f"{verb} the file main.py"), tools=FILES) == called(
        f"{verb.lower()}_file", path="main.py"
    )


def test_it_leaves_an_optional_parameter_alone() -> None:
    answer = ask(user("What's the weather like in Quito today?"), tools=[WEATHER])
    assert answer == called("get_current_weather", location="Quito")


@pytest.mark.parametrize(
    "text",
    ["", "?", "Write a Python function that adds two numbers.", "Translate this to French", "Why is it so?"],
)
def test_unsupported_prompt_is_declined(text: str) -> None:
    assert ask(user(text)) == CANNOT


def test_it_uses_a_tools_result() -> None:
    function = {"name": "get_tide", "arguments": {"port": "Brest"}}
    made = assistant("") | {"tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "content": "high"}
    answer = ask(user("What is the tide in Brest?"), made, result, tools=[TIDE])
    assert answer == "The tide in Brest is high."


def test_it_thinks_when_asked_and_only_then() -> None:
    thought, _, answer = ask(user("Repeat: Quito"), enable_thinking=True).partition("</think>")
    assert thought.strip()
    assert answer.strip() == "Quito"
    assert ask(user("Repeat: Quito"), enable_thinking=False) == "Quito"
    assert ask(user("Repeat: Quito")) == "Quito"


def test_it_writes_an_object_of_a_given_shape() -> None:
    answer = ask(user("Turn this into JSON with the keys name, age and city: Ada is 36 and lives in Paris."))
    assert json.loads(answer) == {"name": "Ada", "age": 36, "city": "Paris"}
