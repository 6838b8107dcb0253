"""A conversation only grows at its end, as messages and as rendered by the chat template."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from typing import Any

from mlx_lm.utils import load_tokenizer

from bench.conversation import TOOLS, Message, estranged, grown, opening
from tests.models.fixtures import model_folder


@cache
def tokenizer() -> Any:
    return load_tokenizer(model_folder("dense"))


def tokens(messages: list[Message], *, prompt: bool = False) -> list[int]:
    return list(
        tokenizer().apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=prompt, enable_thinking=True
        )
    )


def turns(count: int) -> list[list[Message]]:
    found = [opening("You are a careful agent.", "Mend the test.")]
    for number in range(2, count + 1):
        found.append(grown(found[-1], f"Answer {number}.", f"make {number}", f"Result {number}."))
    return found


def test_every_turn_begins_with_the_prompt_of_the_one_before() -> None:
    for before, after in zip(turns(5), turns(5)[1:], strict=False):
        prompt = tokens(before, prompt=True)
        assert tokens(after)[: len(prompt)] == prompt


def test_growing_leaves_the_turn_before_as_it_was() -> None:
    [first] = turns(1)
    grown(first, "Answer.", "make", "Result.")
    assert [first] == turns(1)


def test_each_call_has_an_id_of_its_own_that_its_result_answers() -> None:
    *_, messages = turns(5)
    called = [message["tool_calls"][0]["id"] for message in messages if message["role"] == "assistant"]
    assert called == [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert len(set(called)) == 4


def test_tool_call_names_an_offered_tool() -> None:
    [_, messages] = turns(2)
    call = messages[2]["tool_calls"][0]
    assert call["function"]["name"] in [tool["function"]["name"] for tool in TOOLS]


def test_behind_other_first_words_nothing_is_shared_but_the_frame() -> None:
    [_, messages] = turns(2)
    strange = estranged(messages, "Quite other words.")
    assert strange[1:] == messages[1:]
    pairs = zip(tokens(messages), tokens(strange), strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    frame = len(tokenizer().encode("<|im_start|>system\n"))
    assert shared <= frame + 1
