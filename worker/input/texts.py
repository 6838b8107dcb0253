"""Tokenize `Embed` and `Rank` requests as mlx-vlm's server does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from protocol.errors import Code, RequestError, too_long
from protocol.messages import Embed, Rank
from protocol.packed_texts import unpack
from worker.input.prompts.render_bound import RENDER_S_MAX, RenderTimeout, within
from worker.input.prompts.token_limit import SLICE_CHARACTERS, Encode, TokenLimit, beginning
from worker.values import NEVER, CancelToken, PreparedTexts, Text

TEXTS_AT_ONCE = 64
"""Texts tokenized in one call; other threads can run between calls."""
CHARACTERS_AT_ONCE = 4 * SLICE_CHARACTERS
"""Characters tokenized in one call, if it has more than one text."""
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
    """`worker.interfaces.TextsPreparer` for embedding models."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        """`tokenizer`: used by no other thread."""
        self._tokenizer = tokenizer
        self._rules = rules

    def prepare(
        self, request: Embed, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> PreparedTexts:
        self._check_dimensions(request.dimensions)
        if request.tokens_max is not None:
            most = min(request.tokens_max, self._rules.context_length)
            request = replace(request, tokens_max=most)
        # A request for the full length is a request for the plain vector.
        dimensions = None if request.dimensions == self._rules.width else request.dimensions
        tokens = self._tokens(request, unpack(request), cancel_token)
        return _prepared(
            request,
            [
                Text(self._fitting(of, request, place), dimensions=dimensions)
                for place, of in sorted(tokens.items())
            ],
        )

    def _tokens(
        self, request: Embed, texts: list[str | list[int]], cancel_token: CancelToken
    ) -> dict[int, list[int]]:
        tokens = {place: text for place, text in enumerate(texts) if isinstance(text, list)}
        spelled = [(place, text) for place, text in enumerate(texts) if isinstance(text, str)]
        shorten = partial(self._bounded, request, cancel_token)
        for some in _batches(spelled, shorten):
            cancel_token.check()
            places, bounded = zip(*some, strict=True)
            encoded = _attempted(request.source, partial(self._spelled, bounded, request.tokens_max))
            tokens |= zip(places, encoded, strict=True)
        return tokens

    def _bounded(self, request: Embed, cancel_token: CancelToken, place: int, text: str) -> str:
        """Return a text, or the part of it that is not going to be truncated. Raises `RequestError` if it is
        certainly too long."""
        encode = partial(_encoded, self._tokenizer)
        source = _name(request, place)
        if request.tokens_max is None:
            limit = TokenLimit(self._rules.context_length, cancel_token=cancel_token)
            _attempted(source, partial(limit.check_text, text, source, encode))
            return text
        if getattr(self._tokenizer, "truncation_side", "right") != "right":
            return text
        return _attempted(source, partial(beginning, text, request.tokens_max, encode, cancel_token))

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
    """`worker.interfaces.TextsPreparer` for cross-encoders: query and document in one sequence. If it is
    too long, the document is truncated."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        """`tokenizer`: used by no other thread."""
        self._tokenizer = tokenizer
        self._rules = rules

    def prepare(
        self, request: Rank, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> PreparedTexts:
        if request.instruction:
            message = "'instruction' is not supported: this model was trained for one kind of relevance."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param="instruction")
        most = min(self._rules.context_length, request.tokens_max or self._rules.context_length)
        marks = self._tokenizer.num_special_tokens_to_add(pair=True)
        encode = partial(_encoded, self._tokenizer)
        _check_query(request, request.query, marks, most, encode, cancel_token)

        def shorten(place: int, text: str) -> str:
            return _attempted(request.source, partial(beginning, text, most, encode, cancel_token))

        query, texts = request.query, list[Text]()
        for some in _batches(list(enumerate(_documents(request))), shorten):
            cancel_token.check()
            documents = [document for _, document in some]
            texts += _attempted(request.source, partial(self._pairs, query, documents, most))
        return _prepared(request, texts)

    def _pairs(self, query: str, documents: list[str], most: int) -> list[Text]:
        encoded = self._tokenizer(
            [query] * len(documents), documents, truncation="only_second", max_length=most
        )
        types = encoded.get("token_type_ids") or [()] * len(documents)
        return [
            Text(tuple(tokens), tuple(of)) for tokens, of in zip(encoded["input_ids"], types, strict=True)
        ]


class JudgePreparer:
    """`worker.interfaces.TextsPreparer` for decoders that are asked whether a document is relevant.
    Prompts that are too long are truncated at the end, in the document."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        """`tokenizer`: used by no other thread; it has a chat template."""
        self._tokenizer = tokenizer
        self._rules = rules
        self._answer = tuple(tokenizer.encode(_ANSWER, add_special_tokens=False))

    def prepare(
        self, request: Rank, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> PreparedTexts:
        documents = _documents(request)
        most = min(self._rules.context_length, request.tokens_max or self._rules.context_length)
        encode = partial(_encoded, self._tokenizer)
        alone = _attempted("query", partial(self._question, request, ""))
        _check_query(request, alone, len(self._answer), most, encode, cancel_token)
        room = most - len(self._answer)

        def tokenize(document: str) -> list[int]:
            rendered = self._question(request, document)
            return list(encode(beginning(rendered, room, encode, cancel_token)))[:room]

        texts: list[Text] = []
        for document in documents:
            cancel_token.check()
            tokens = _attempted(request.source, partial(tokenize, document))
            texts.append(Text((*tokens, *self._answer)))
        return _prepared(request, texts)

    def _question(self, request: Rank, document: str) -> str:
        """Return the prompt without its answer. Raises `ValueError` if the chat template does not end."""
        asked = (
            f"<Instruct>: {request.instruction or INSTRUCTION}\n\n<Query>: {request.query}"
            f"\n\n<Document>: {document}"
        )
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            tokenize=False,
            add_generation_prompt=False,
            enable_thinking=False,
        )
        try:
            return str(within(RENDER_S_MAX, render))
        except RenderTimeout as error:
            raise ValueError(f"the chat template does not end: {error}") from None


def _check_query(
    request: Rank, prompt: str, marks: int, most: int, encode: Encode, cancel_token: CancelToken
) -> None:
    """Raise `RequestError` if a prompt without a document, and `marks` more tokens, leave no room for one."""
    limit, source = TokenLimit(most, cancel_token=cancel_token), "query"
    if len(request.instruction) > len(request.query):
        source = "instruction"
    count, more = 0, ""
    try:
        _attempted(source, partial(limit.check_text, prompt, source, encode))
        count = len(_attempted(source, partial(encode, prompt))) + marks
    except RequestError as error:
        if error.code is not Code.CONTEXT_LENGTH_EXCEEDED:
            raise
        count, more = most, "more than "
    if more or count >= most:
        message = (
            f"'{source}' leaves no room for a document: without one there are {more}{count} tokens, and "
            f"query and document can have at most {most} together. Please reduce the length of the {source}."
        )
        details: dict[str, object] = {"prompt_tokens": count + bool(more), "context_length": most}
        raise RequestError(Code.CONTEXT_LENGTH_EXCEEDED, message, param=source, details=details)


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


_T = TypeVar("_T")


def _attempted(source: str, tokenize: Callable[[], _T]) -> _T:
    try:
        return tokenize()
    except (TypeError, ValueError) as error:  # for example, half a surrogate pair
        message = f"The {source} cannot be tokenized: {error}"
        raise RequestError(Code.INVALID_REQUEST, message, param=source) from error


def _encoded(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    tokens: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def _batches(
    texts: Sequence[tuple[int, str]], shorten: Callable[[int, str], str]
) -> Iterator[list[tuple[int, str]]]:
    """Yield the texts, each with its index and shortened, in batches that are tokenized in one call."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for place, text in texts:
        text = shorten(place, text)
        if batch and (len(batch) == TEXTS_AT_ONCE or characters + len(text) > CHARACTERS_AT_ONCE):
            yield batch
            batch, characters = [], 0
        batch.append((place, text))
        characters += len(text)
    if batch:
        yield batch
