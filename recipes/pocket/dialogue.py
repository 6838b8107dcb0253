"""Building blocks of all dialogue families, and tokenization of a dialogue with a loss mask."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
Image = NDArray[np.uint8]

_ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
_PLACEHOLDER = "<|image_pad|>"


@dataclass(frozen=True)
class Exchange:
    """A question with its answer; `thought`: the reasoning before it, written when reasoning is enabled."""

    question: str
    answer: str
    thought: str = "I can answer this at once."


@dataclass
class Dialogue:
    """Messages, the last of which is the assistant's; every assistant turn is in the loss."""

    family: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thought: str = "I can answer this at once."
    images: list[Image] = field(default_factory=list)
    thinking: bool | None = None

    @property
    def answer(self) -> str:
        """The text of the last turn, as the model should write it."""
        last = self.messages[-1]
        if calls := last.get("tool_calls"):
            return "\n".join(_written(call["function"]) for call in calls)
        return str(last["content"])

    @property
    def target(self) -> str:
        """The text after the prompt, without the end of the turn."""
        return f"{self.thought}\n</think>\n\n{self.answer}" if self.thinking else self.answer


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def tool_result(text: str) -> Message:
    return {"role": "tool", "content": text}


def calls(name: str, *arguments: dict[str, Any]) -> Message:
    """Return a message that calls the tool once for each of `arguments`."""
    functions = [{"name": name, "arguments": given} for given in arguments]
    called = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": called}


def turns(exchange: Exchange) -> list[Message]:
    return [user(exchange.question), assistant(exchange.answer)]


def prompt_text(dialogue: Dialogue, tokenizer: Any) -> str:
    """Return the prompt of the last answer, with each image's placeholder repeated once per token of the
    image."""
    options = {} if dialogue.thinking is None else {"enable_thinking": dialogue.thinking}
    text: str = tokenizer.apply_chat_template(
        dialogue.messages[:-1],
        tools=dialogue.tools or None,
        tokenize=False,
        add_generation_prompt=True,
        **options,
    )
    head, *rest = text.split(_PLACEHOLDER)
    for image, tail in zip(dialogue.images, rest, strict=True):
        head += _PLACEHOLDER * image_tokens(image) + tail
    return head


def image_tokens(image: Image) -> int:
    return (image.shape[0] // 32) * (image.shape[1] // 32)


def encode(dialogue: Dialogue, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return token ids and the loss mask, which includes the answers of earlier turns."""
    prompt = prompt_text(dialogue, tokenizer)
    ids: list[int] = []
    learnt: list[bool] = []
    end = 0
    for match in _ANSWER.finditer(prompt):
        _extend(ids, learnt, tokenizer, prompt[end : match.start(1)], False)
        _extend(ids, learnt, tokenizer, match.group(1), True)
        end = match.end(1)
    _extend(ids, learnt, tokenizer, prompt[end:], False)
    _extend(ids, learnt, tokenizer, dialogue.target + "<|im_end|>", True)
    return ids, learnt


def _extend(ids: list[int], learnt: list[bool], tokenizer: Any, text: str, own: bool) -> None:
    # `_tokenizer` is the Rust tokenizer, several times faster than its wrapper.
    new = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    ids += new
    learnt += [own] * len(new)


def _written(function: dict[str, Any]) -> str:
    import json

    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
