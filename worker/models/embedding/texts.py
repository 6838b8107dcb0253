"""Tokenize `Embed` and `Rank` requests as mlx-vlm's server does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from protocol.errors import Code, RequestError, too_long
from protocol.messages import Embed, Rank
from protocol.packed_texts import unpack
from worker.contract.texts import PreparedTexts, Text

TEXTS_AT_ONCE = 64
"""Texts tokenized in one call; other threads can run between calls."""
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

Tokenizer = Any
"""A tokenizer of transformers, called with one or two texts or lists of texts."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """Limits of a model's texts. `context_length`, `vocabulary`: in tokens. `width`: length of its
    vectors. `shorter_sizes`: shorter lengths that may be requested; None: any."""

    context_length: int
    vocabulary: int
    width: int
    shorter_sizes: frozenset[int] | None = frozenset()


class EmbedPreparer:
    """`worker.contract.texts.TextsPreparer` for embedding models."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        """`tokenizer`: used by no other thread."""
        self._tokenizer = tokenizer
        self._rules = rules

    def prepare(self, request: Embed, media: Sequence[bytes]) -> PreparedTexts:
        self._check_dimensions(request.dimensions)
        if request.tokens_max is not None:
            most = min(request.tokens_max, self._rules.context_length)
            request = replace(request, tokens_max=most)
        # A request for the full length is a request for the plain vector.
        dimensions = None if request.dimensions == self._rules.width else request.dimensions
        tokens = self._tokens(request, unpack(request))
        return _prepared(
            request,
            [
                Text(self._fitting(of, request, place), dimensions=dimensions)
                for place, of in sorted(tokens.items())
            ],
        )

    def _tokens(self, request: Embed, texts: list[str | list[int]]) -> dict[int, list[int]]:
        tokens = {place: text for place, text in enumerate(texts) if isinstance(text, list)}
        spelled = [(place, text) for place, text in enumerate(texts) if isinstance(text, str)]
        for first in range(0, len(spelled), TEXTS_AT_ONCE):
            places, some = zip(*spelled[first : first + TEXTS_AT_ONCE], strict=True)
            encoded = _attempted(request.source, partial(self._spelled, some, request.tokens_max))
            tokens |= zip(places, encoded, strict=True)
        return tokens

    def _spelled(self, texts: Sequence[str], most: int | None) -> list[list[int]]:
        cut = {} if most is None else {"truncation": True, "max_length": most}
        tokens: list[list[int]] = self._tokenizer(list(texts), **cut)["input_ids"]
        return tokens

    def _check_dimensions(self, dimensions: int | None) -> None:
        rules = self._rules
        if dimensions is None or dimensions == rules.width:
            return
        if 1 <= dimensions < rules.width and (
            rules.shorter_sizes is None or dimensions in rules.shorter_sizes
        ):
            return
        raise RequestError(Code.INVALID_REQUEST, _wrong_dimensions(rules), param="dimensions")

    def _fitting(self, tokens: Sequence[int], request: Embed, place: int) -> tuple[int, ...]:
        source, rules = _name(request, place), self._rules
        last = rules.vocabulary - 1
        if (highest := max(tokens, default=0)) > last:
            message = f"'{source}' has the token {highest}, but this model's tokens are 0 to {last}."
            raise RequestError(Code.INVALID_REQUEST, message, param=source)
        if not tokens:
            raise RequestError(Code.INVALID_REQUEST, f"The {source} must not be empty.", param=source)
        if request.tokens_max is not None:
            tokens = tokens[: request.tokens_max]
        if len(tokens) > rules.context_length:
            raise too_long(rules.context_length, len(tokens), source, by_memory=False)
        return tuple(tokens)


def _wrong_dimensions(rules: TextRules) -> str:
    if rules.shorter_sizes is None:
        return f"'dimensions' must be between 1 and {rules.width}, the length of this model's vectors."
    others = [str(length) for length in sorted(rules.shorter_sizes)]
    if others:
        return f"'dimensions' must be one of {', '.join(others)} and {rules.width} with this model."
    return (
        f"'dimensions' can only be {rules.width} with this model: its config.json does not say "
        "(is_matryoshka) that its vectors can be truncated."
    )


class PairPreparer:
    """`worker.contract.texts.TextsPreparer` for cross-encoders: query and document in one sequence. If it is
    too long, the longer of the two is truncated first."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        """`tokenizer`: used by no other thread."""
        self._tokenizer = tokenizer
        self._rules = rules

    def prepare(self, request: Rank, media: Sequence[bytes]) -> PreparedTexts:
        if request.instruction:
            message = "'instruction' is not supported: this model was trained for one kind of relevance."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param="instruction")
        documents = _documents(request)
        most = min(self._rules.context_length, request.tokens_max or self._rules.context_length)
        texts: list[Text] = []
        for first in range(0, len(documents), TEXTS_AT_ONCE):
            some = documents[first : first + TEXTS_AT_ONCE]
            texts += _attempted(request.source, partial(self._pairs, request.query, some, most))
        return _prepared(request, texts)

    def _pairs(self, query: str, documents: list[str], most: int) -> list[Text]:
        encoded = self._tokenizer([query] * len(documents), documents, truncation=True, max_length=most)
        types = encoded.get("token_type_ids") or [()] * len(documents)
        return [
            Text(tuple(tokens), tuple(of)) for tokens, of in zip(encoded["input_ids"], types, strict=True)
        ]


class JudgePreparer:
    """`worker.contract.texts.TextsPreparer` for decoders that are asked whether a document is relevant.
    Prompts that are too long are truncated at the end."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        """`tokenizer`: used by no other thread; it has a chat template."""
        self._tokenizer = tokenizer
        self._rules = rules
        self._answer = tuple(tokenizer.encode(_ANSWER, add_special_tokens=False))

    def prepare(self, request: Rank, media: Sequence[bytes]) -> PreparedTexts:
        documents = _documents(request)
        most = min(self._rules.context_length, request.tokens_max or self._rules.context_length)
        asked = _attempted(request.source, partial(self._asked, request, documents))
        room = max(0, most - len(self._answer))
        return _prepared(request, [Text((*question[:room], *self._answer)) for question in asked])

    def _asked(self, request: Rank, documents: Sequence[str]) -> list[list[int]]:
        return [self._question(request, document) for document in documents]

    def _question(self, request: Rank, document: str) -> list[int]:
        asked = (
            f"<Instruct>: {request.instruction or INSTRUCTION}\n\n<Query>: {request.query}"
            f"\n\n<Document>: {document}"
        )
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False, enable_thinking=False
        )
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))


def _prepared(request: Embed | Rank, texts: Sequence[Text]) -> PreparedTexts:
    return PreparedTexts(
        id=request.id,
        texts=tuple(texts),
        answered=frozenset(request.answered),
        priority=request.priority,
        deadline_s=request.deadline_s,
    )


def _name(request: Embed | Rank, place: int) -> str:
    return request.source if request.count == 1 else f"{request.source}[{place}]"


def _documents(request: Rank) -> list[str]:
    texts = unpack(request)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            source = _name(request, place)
            raise RequestError(Code.INVALID_REQUEST, f"'{source}' must be text.", param=source)
    return [str(text) for text in texts]


def _attempted(source: str, tokenize: Callable[[], list[Any]]) -> list[Any]:
    try:
        return tokenize()
    except (TypeError, ValueError) as error:  # for example, half a surrogate pair
        message = f"The {source} cannot be tokenized: {error}"
        raise RequestError(Code.INVALID_REQUEST, message, param=source) from error
