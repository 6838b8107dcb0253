"""A conversation only grows at its end, as messages and as rendered by the chat template."""

from __future__ import annotations

from itertools import pairwise, takewhile
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from bench.conversation import TOOLS, Message, estranged, grown, opening
from tests.models.fixtures import model_folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(model_folder("dense"))


def tokens(tokenizer: Any, messages: list[Message], *, prompt: bool = False) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=prompt, enable_thinking=True
        )
    )


def turns(count: int) -> list[list[Message]]:
    found = [opening("You are a careful agent.", "Mend the test.")]
    for number in range(2, count + 1):
        found.append(grown(found[-1], f"Answer {number}.", f"make {number}", f"Result {number}."))
    return found


def test_every_turn_begins_with_the_prompt_of_the_one_before_and_calls_a_tool(tokenizer: Any) -> None:
    for before, after in pairwise(turns(4)):
        prompt = tokens(tokenizer, before, prompt=True)
        assert tokens(tokenizer, after)[: len(prompt)] == prompt
    calls = [message["tool_calls"][0] for message in turns(4)[-1] if message["role"] == "assistant"]
    answered = [message["tool_call_id"] for message in turns(4)[-1] if message["role"] == "tool"]
    assert [call["id"] for call in calls] == answered
    assert len(set(answered)) == 3
    assert {call["function"]["name"] for call in calls} <= {tool["function"]["name"] for tool in TOOLS}


def test_behind_other_first_words_nothing_is_shared_but_the_frame(tokenizer: Any) -> None:
    [_, messages] = turns(2)
    strange = estranged(messages, "Quite other words.")
    assert strange[1:] == messages[1:]
    pairs = zip(tokens(tokenizer, messages), tokens(tokenizer, strange), strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert shared <= len(tokenizer.encode("<|im_start|>system\n")) + 1
