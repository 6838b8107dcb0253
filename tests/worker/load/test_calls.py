"""Tool calls in the tokens of real tokenizers: markers as special tokens, added tokens or plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from tests.worker.output.calls.parsed_answers import (
    Model,
    bare_tokenizer,
    grown,
    in_pieces,
    in_tokens,
    model,
    named,
    schemas_in,
)
from tests.worker.output.calls.written import FORMATS, calls_in, tools_for
from worker.input.prompts.format import CallFormat
from worker.output.calls.writer import CallNumbering
from worker.output.channels import REASONING, ChannelProcessor
from worker.output.text import Vocabulary

SPECIAL = {
    "json_tools": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral_list": ("[TOOL_CALLS]",),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"),
    "muse_spark": ("<atem:function_calls>", "</atem:function_calls>"),
    "qwen3_coder": (),
}
TOOLS: dict[str, Any] = {"get": {"properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Quito"}}\n</tool_call>'
THINKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
texts = st.text("ab 你😀é\n.", max_size=8)


def of(name: str, kind: str) -> Model:
    special = SPECIAL[name]
    match kind:
        case "special":
            return model(special=special)
        case "added":
            return model(added=special)
    return model()


def spelled_out(it: Model, text: str) -> list[int]:
    return [token for character in text for token in it.encode(character)]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "special") for name in SPECIAL), ("json_tools", "added"), ("gemma4", "plain")]
)
@given(data=st.data())
@settings(max_examples=12)
def test_tokens_say_the_calls_of_the_text_however_resumed(name: str, kind: str, data: st.DataObject) -> None:
    form, it = FORMATS[name], of(name, kind)
    calls = data.draw(calls_in(form))
    text = data.draw(texts) + form.write(calls) + data.draw(texts)
    tools = schemas_in(tools_for(calls))
    tokens = it.encode(text)
    if not any(mark in str(calls) for mark in SPECIAL[name]):  # as tokens they have no text
        said, expected = in_tokens(it.open(tools), tokens), in_pieces(tools, [text])
        assert (said.text, said.calls) == (expected.text, expected.calls)
        assert said.parsed() == calls
    for _ in range(data.draw(st.integers(0, 3))):  # damage, which raises nothing
        place = data.draw(st.integers(0, len(tokens)))
        tokens.insert(place, data.draw(st.integers(0, len(it.tokenizer) + 1)))
    first, second = it.open(tools), it.open(tools)
    undisturbed = [*map(first.push, tokens), first.flush()]
    said = grown(undisturbed)
    json.dumps([said.text, said.calls], ensure_ascii=False).encode()
    place = data.draw(st.integers(0, len(tokens)))
    for token in tokens[:place]:
        second.push(token)
    assert [*map(second.push, tokens[place:]), second.flush()] == undisturbed[place:]
    assert second.has_called == first.has_called


def test_no_special_token_is_shown_in_a_text_that_calls_nobody_nor_in_a_string() -> None:
    it = model(special=("[TOOL_CALLS]", "[ARGS]"))
    assert in_tokens(it.open(TOOLS), it.encode("[TOOL_CALLS]nobody[ARGS]{}")).text == "nobody{}"
    said = in_tokens(it.open(TOOLS), it.encode('[TOOL_CALLS]get[ARGS]{"city": "Qui[ARGS]to"}'))
    assert said.parsed() == [("get", {"city": "Quito"})]


def test_the_first_whole_call_ends_an_answer_that_may_have_one() -> None:
    it = model(added=("<tool_call>", "</tool_call>"))
    tokens = it.encode("Se" + CALL + CALL)
    output_processor = it.open(TOOLS, stop=["See"], single=True)
    growths = [output_processor.push(token) for token in tokens]
    said = grown(growths)
    assert output_processor.stopped
    assert output_processor.has_called
    assert (said.text, said.parsed()) == ("Se", [("get", {"city": "Quito"})])
    half = it.open(TOOLS)
    for token in it.encode(CALL[: CALL.index("}}") + 1]):
        half.push(token)
    assert not half.has_called, "half a call is none"
    stopped_at = len(it.encode("Se" + CALL[: CALL.index("\n</")]))
    assert not any(growth.calls or growth.text for growth in growths[stopped_at:])


def thinking(special: bool) -> Model:
    return model(
        special=THINKS if special else (),
        added=() if special else THINKS,
        start="<tool_call>",
        end="</tool_call>",
    )


@pytest.mark.parametrize("special", [False, True])
def test_a_call_ends_the_thought_that_it_stands_in(special: bool) -> None:
    it = thinking(special)
    output_processor = it.open(TOOLS, REASONING)
    said = in_tokens(output_processor, it.encode(f"I look it up.\n{CALL}\nDone."))
    assert (said.reasoning, said.text) == ("I look it up.\n", "\nDone.")
    assert said.parsed() == [("get", {"city": "Quito"})]
    assert output_processor.reasoning_tokens == len(it.encode("I look it up.\n"))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("words", ["<tool_call>", '<tool_call>{"name": "nobody"}', "<tool_call>get it"])
def test_a_marker_that_calls_nobody_is_thought(special: bool, words: str) -> None:
    it = thinking(special)
    output_processor = it.open(TOOLS, REASONING)
    tokens = it.encode(f"Is {words} right?")
    said = in_tokens(output_processor, [*tokens, *it.encode("</think>Yes")])
    shown = words.replace("<tool_call>", "") if special else words
    assert (said.reasoning, said.text, said.calls) == (f"Is {shown} right?", "Yes", [])
    assert output_processor.reasoning_tokens == len(tokens)


@pytest.mark.parametrize("special", [False, True])
def test_a_call_that_is_only_spelled_out_in_a_thought_is_thought(special: bool) -> None:
    it = thinking(special)
    tokens = spelled_out(it, CALL)
    said = in_tokens(it.open(TOOLS, REASONING), tokens)
    assert (said.reasoning, said.calls) == (CALL, [])
    assert in_tokens(it.open(TOOLS), tokens).parsed() == [("get", {"city": "Quito"})]


def test_an_object_at_the_beginning_of_the_content_is_a_call_behind_a_thought_too() -> None:
    it = thinking(False)
    bare = '{"name": "get", "parameters": {"city": "Quito"}}'
    for text in (f"<think>Hm</think>\n\n{bare}", f"\n{bare}"):
        assert in_tokens(it.open(TOOLS), it.encode(text)).parsed() == [("get", {"city": "Quito"})]
    assert in_tokens(it.open(TOOLS), it.encode(f"So: {bare}")).calls == []


@pytest.mark.parametrize("plain", [False, True])
def test_heads_lead_to_calls_and_are_not_shown(plain: bool) -> None:
    """In Muse Spark's format."""
    backend = bare_tokenizer()
    backend.add_special_tokens(["<|message|>", "<|eom|>", "<|eot|>", "<|start|>"])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = TokenizerWrapper(
        inner,
        response_format=RESPONSE_FORMAT,
        tool_call_start="<atem:function_calls>",
        tool_call_end="</atem:function_calls>",
    )
    vocabulary = Vocabulary(inner)
    form = CallFormat(tokenizer, vocabulary)
    text = (
        "to=self<|message|>Hm<|eom|><|start|>assistant to=get<|message|><atem:function_calls>\n"
        '<atem:invoke name="get"><atem:parameter name="city">Quito</atem:parameter></atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Yes, to=self.<|eot|>"
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if plain:
        tokens = spelled_out(Model(tokenizer, vocabulary, form), text)
    opening = tokenizer.response_initial_state
    assert opening is not None
    calls = CallNumbering(TOOLS, named, single=False)
    said = in_tokens(ChannelProcessor(vocabulary, form.open(opening, calls), form.signs, ()), tokens)
    assert (said.reasoning, said.text) == ("Hm", "Yes, to=self.")
    assert said.parsed() == [("get", {"city": "Quito"})]
    calls = CallNumbering(TOOLS, named, single=False)
    said = in_tokens(ChannelProcessor(vocabulary, form.open(opening, calls), form.signs, ()), tokens[:2])
    assert said.text


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")])
def test_stop_strings_count_in_the_content_alone(special: tuple[str, ...]) -> None:
    it = model(special=special)
    tokens = it.encode(f"See: {CALL} and Quito.")
    said = in_tokens(it.open(TOOLS, stop=["Quito"]), tokens)
    assert (said.text, len(said.calls)) == ("See:  and ", 1)
    assert in_tokens(it.open(TOOLS, stop=["See"]), tokens).calls == []
    assert in_tokens(it.open(TOOLS, stop=["get"]), tokens).text == "See:  and Quito."
