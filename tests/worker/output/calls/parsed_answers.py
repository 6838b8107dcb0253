"""Parsed output of a text with tool calls, given as pieces of text or as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from protocol.types import CallDelta
from tests.models.fixtures import model_folder
from worker.input.prompts.format import CallFormat
from worker.output.calls.writer import CallNumbering
from worker.output.channels import CALLED, CONTENT, ChannelProcessor
from worker.output.text import Vocabulary
from worker.values import OutputDelta


@dataclass
class ParsedAnswer:
    """Parsed output. `calls`: id, name and arguments of each; `whole`: indices of complete calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)

    def add(self, delta: CallDelta) -> None:
        if delta.name:
            assert delta.index == len(self.calls)
            self.calls.append((delta.id, delta.name, delta.arguments))
        else:
            assert delta.index == len(self.calls) - 1
            id, name, arguments = self.calls[-1]
            self.calls[-1] = (id, name, arguments + delta.arguments)
            assert not delta.id

    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def bare_tokenizer() -> Tokenizer:
    document = json.loads((model_folder("dense") / "tokenizer.json").read_text())
    return Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))


@dataclass(frozen=True)
class Model:
    """A tokenizer and its call format."""

    tokenizer: TokenizerWrapper
    vocabulary: Vocabulary
    form: CallFormat

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def open(
        self,
        tools: Mapping[str, Any],
        state: str = CONTENT,
        *,
        stop: Sequence[str] = (),
        single: bool = False,
    ) -> ChannelProcessor:
        reading = self.form.open(state, CallNumbering(tools, named, single=single))
        return ChannelProcessor(self.vocabulary, reading, self.form.signs, stop, single_call=single)


def named(index: int) -> str:
    return f"call-{index}"


@cache
def model(
    special: tuple[str, ...] = (), added: tuple[str, ...] = (), start: str = "", end: str = ""
) -> Model:
    """Return a model whose tokenizer has these tokens in addition to the test vocabulary."""
    backend = bare_tokenizer()
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = TokenizerWrapper(inner, tool_call_start=start or None, tool_call_end=end or None)
    vocabulary = Vocabulary(inner)
    return Model(tokenizer, vocabulary, CallFormat(tokenizer, vocabulary))


def in_pieces(
    tools: Mapping[str, Any], pieces: Iterable[str], *, has_ended: bool = False, **allowed: bool
) -> ParsedAnswer:
    """Parse pieces of text with the call parser alone, without tokens. `has_ended`: the model ended it."""
    reading = model().form.open(CONTENT, CallNumbering(tools, named, **{"single": False, **allowed}))
    said = ParsedAnswer()
    for piece in [*map(reading.split, pieces), reading.rest(has_ended=has_ended)]:
        for state, grown in piece:
            if isinstance(grown, CallDelta):
                said.add(grown)
                said.whole += [grown.index] if state == CALLED else []
            else:
                said.text += grown
    return said


def either_way(tools: Mapping[str, Any], text: str, **options: bool) -> ParsedAnswer:
    """Parse the text by characters and at once, and check that the results are equal."""
    whole = in_pieces(tools, [text], **options)
    assert in_pieces(tools, text, **options) == whole
    return whole


def only_call(said: ParsedAnswer) -> Any:
    """Return the arguments of the only call, which must be complete and without text around it."""
    assert (said.text, said.whole) == ("", [0])
    return json.loads(said.calls[0][2])


def grown(growths: Iterable[OutputDelta]) -> ParsedAnswer:
    """Collect the deltas of an output processor."""
    said = ParsedAnswer()
    for growth in growths:
        said.text += growth.text
        said.reasoning += growth.reasoning
        for delta in growth.calls:
            said.add(delta)
    return said


def in_tokens(output_processor: ChannelProcessor, tokens: Iterable[int]) -> ParsedAnswer:
    growths = []
    for token in tokens:
        growths.append(output_processor.push(token))
        if output_processor.stopped:
            return grown(growths)
    return grown([*growths, output_processor.flush()])


def schemas_in(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
