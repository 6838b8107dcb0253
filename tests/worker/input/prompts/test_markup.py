"""Reasoning and channels of families whose markers upstream does not guess, token by token."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests import factories
from tests.worker.output.calls.parsed_answers import ParsedAnswer, bare_tokenizer
from worker.input.prompts.format import opening_of
from worker.input.prompts.markup import HARMONY_HEAD, THOUGHTS, complete
from worker.load.text import OutputProcessors
from worker.output.channels import CONTENT, REASONING
from worker.values import EngineRequest

TOOLS: dict[str, Any] = {"get_weather": {"properties": {"city": {"type": "string"}}}}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>I look."
CALLED = '<|message|>{"city":"Quito"}<|call|>'
PARIS = '<|message|>{"city":"Paris"}'


def tokenizer_with(*special: str) -> TokenizerWrapper:
    """Return a byte-level tokenizer with these special tokens."""
    tokenizer = bare_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return complete(TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer)))


def answer(
    tokenizer: TokenizerWrapper, text: str, opening: str = CONTENT, tools: Any = TOOLS
) -> ParsedAnswer:
    """Return what clients get of an answer whose tokens are those of `text`."""
    request: EngineRequest = factories.engine_request("a", opening=opening, tools=tools)
    processor, said = OutputProcessors(tokenizer).open(request), ParsedAnswer()
    deltas = [processor.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    for delta in [*deltas, processor.flush(has_ended=True)]:
        said.text += delta.text
        said.reasoning += delta.reasoning
        for call in delta.calls:
            said.add(call)
    return said


@pytest.mark.parametrize(("start", "end"), THOUGHTS)
@pytest.mark.parametrize("tools", [TOOLS, {}])
def test_thoughts_between_tokens_are_reasoning(start: str, end: str, tools: Any) -> None:
    tokenizer = tokenizer_with(start, end)
    assert (tokenizer.think_start, tokenizer.think_end) == (start, end)
    said = answer(tokenizer, f"{start}Let me think.{end}It is 391.", tools=tools)
    assert (said.reasoning, said.text) == ("Let me think.", "It is 391.")
    said = answer(tokenizer, f"Let me think.{end}It is 391.", REASONING, tools)
    assert (said.reasoning, said.text) == ("Let me think.", "It is 391.")


@pytest.mark.parametrize(("start", "end"), [("<think>", "</think>"), ("◁think▷", "◁/think▷")])
@pytest.mark.parametrize("tools", [TOOLS, {}])
def test_plain_thoughts_are_reasoning_at_first_and_cited_elsewhere(start: str, end: str, tools: Any) -> None:
    tokenizer = tokenizer_with("<end>")
    said = answer(tokenizer, f"{start}Let me think.{end}It is 391.", tools=tools)
    assert (said.reasoning, said.text) == ("Let me think.", "It is 391.")
    for text in (f"Put it in {start} and {end}.", start[:-1], "<b>bold</b>", f"`{start}`"):
        said = answer(tokenizer, text, tools=tools)
        assert (said.reasoning, said.text) == ("", text)


@pytest.mark.parametrize("start", ["<think>", "◁think▷"])
def test_a_plain_thought_may_be_opened_by_the_template(start: str) -> None:
    tokenizer = tokenizer_with("<end>")
    for asked, turn, opening in (
        ("Hi.", f"A: {start}\n", REASONING),
        (f"What is {start}?", "A: ", CONTENT),
        (f"What is {start}?", f"A: {start}\n", REASONING),
        ("Hi.", f"A: {start}\n{start.replace('think', '/think')}\n", CONTENT),
    ):
        assert opening_of(tokenizer, f"{asked}\n{turn}", lambda asked=asked: f"{asked}\n") == opening


def test_tokens_around_a_response_are_hidden() -> None:
    marks = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    tokenizer = tokenizer_with(*marks)
    said = answer(tokenizer, "{}I look.{}{}Hi.{}".format(*marks))
    assert (said.reasoning, said.text) == ("I look.", "Hi.")


def test_tags_around_an_answer_are_hidden_where_the_template_has_them() -> None:
    tokenizer, text = tokenizer_with("<end>"), "<answer>\n19 <20</answer>, in </answer>."
    assert answer(tokenizer, text).text == text
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('<answer>')[-1] }}{% endfor %}"
    tokenizer.has_chat_template = True
    assert answer(tokenizer, text, tools={}).text == "\n19 <20, in ."


# --- harmony ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}{NEXT}<|channel|>final<|message|>Hello there!<|return|>", "I look.", "Hello there!", []),
        ("<|channel|>final<|message|>The analysis.<|return|>", "", "The analysis.", []),
        (
            f"{THOUGHT}{NEXT}<|channel|>commentary to=functions.get_weather <|constrain|>json{CALLED}",
            "I look.", "", [("get_weather", {"city": "Quito"})],
        ),
        (
            f"{THOUGHT}{NEXT} to=functions.get_weather<|channel|>commentary <|constrain|>json{CALLED}",
            "I look.", "", [("get_weather", {"city": "Quito"})],
        ),
        (
            f"{THOUGHT}{NEXT}<|channel|>analysis to=functions.get_weather{CALLED}",
            "I look.", "", [("get_weather", {"city": "Quito"})],
        ),
        (
            f"<|channel|>commentary<|message|>I will look.{NEXT}<|channel|>commentary "
            f"to=functions.get_weather{CALLED}<|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather{PARIS}",
            "", "I will look.", [("get_weather", {"city": "Quito"}), ("get_weather", {"city": "Paris"})],
        ),
        ("No head at all.", "", "No head at all.", []),
    ],
)  # fmt: skip
def test_channels_are_followed(text: str, reasoning: str, content: str, calls: list[tuple[str, Any]]) -> None:
    said = answer(tokenizer_with(*HARMONY), text, HARMONY_HEAD)
    assert (said.reasoning, said.text, said.parsed()) == (reasoning, content, calls)


def test_without_tools_heads_are_hidden_too() -> None:
    text = f"{THOUGHT}{NEXT}<|channel|>final<|message|>Hello there!"
    said = answer(tokenizer_with(*HARMONY), text, HARMONY_HEAD, tools={})
    assert (said.reasoning, said.text) == ("I look.", "Hello there!")


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", HARMONY_HEAD),
        ("<|start|>assistant<|channel|>final<|message|>Yes, ", CONTENT),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", REASONING),
        ("a raw prompt", CONTENT),
    ],
)
def test_an_answer_begins_where_the_prompt_ends(prompt: str, opening: str) -> None:
    assert opening_of(tokenizer_with(*HARMONY), prompt, lambda: "") == opening
