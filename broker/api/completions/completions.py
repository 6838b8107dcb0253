"""OpenAI's legacy text completions: body -> `Generate`, and the renderer of a choice."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from broker.dialects.body import NonEmptyStr, decode, encode, encode_text, refuse, wrong
from broker.dialects.logprobs import LegacyLogprobs, legacy_lists
from broker.dialects.parameters import (
    CHOICES_MAX,
    Choices,
    PromptText,
    TextOrTokens,
    TokensOrNone,
    check,
    check_max_tokens,
    check_texts,
    copies,
    is_one_text,
    limit_texts,
    sampling,
    sparse_of,
    stop_strings,
    texts_of,
    token_limit,
)
from broker.dialects.response_format import FormParameters, form_of
from protocol.messages import Accepted, Generate, PromptLogprobs
from protocol.types import Delta, PromptToken

MAX_TOKENS_DEFAULT = 16


class Body(FormParameters, kw_only=True):
    """Body fields beside the shared ones. Other fields are ignored. `max_tokens`: 0 only with `echo`."""

    prompt: NonEmptyStr | Annotated[list[TextOrTokens], limit_texts(CHOICES_MAX)]
    max_tokens: TokensOrNone | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[PromptText]:
        """Prompts as texts or as lists of token ids."""
        return texts_of(self.prompt)

    def name_of(self, place: int) -> str:
        """Return the parameter name of the prompt at index `place`."""
        return "prompt" if is_one_text(self.prompt) else f"prompt[{place}]"

    @property
    def choices(self) -> int:
        """Number of answers: `n` for each prompt."""
        return len(self.prompts) * (self.n or 1)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if body.echo and body.suffix:
        raise refuse("echo", "cannot be combined with 'suffix'")
    check(body)
    if not body.echo:
        check_max_tokens(body, "max_tokens")
    if body.best_of not in (None, 1, body.n or 1):
        raise refuse("best_of", "must equal 'n': sampling more answers than are returned is not supported")
    check_texts("prompt", body.prompt)
    if body.choices > CHOICES_MAX:
        raise wrong("prompt", f"and 'n' ask for {body.choices} answers; at most {CHOICES_MAX} are allowed")
    form_of(body)
    return body


# --- to the worker -----------------------------------------------------------------------------------


def generate(body: Body, *, id: str, incarnation: str) -> list[Generate]:
    """Return the requests to the worker in the order of the choices: prompt by prompt.

    Every prompt starts from the same seed, so its answers are those that it would get alone.
    """
    drawn, form = sampling(body, body.logprobs), form_of(body)
    requests: list[Generate] = []
    for place, prompt in enumerate(body.prompts):
        first = Generate(
            incarnation=incarnation,
            id=f"{id}.{place}" if place else id,
            sampling=drawn,
            prompt=prompt if isinstance(prompt, str) else None,
            tokens=prompt if isinstance(prompt, list) else None,
            suffix=body.suffix or "",
            source="" if len(body.prompts) == 1 and isinstance(prompt, str) else body.name_of(place),
            echo=_is_for_worker(body, prompt),
            stop=stop_strings(body),
            max_tokens=MAX_TOKENS_DEFAULT if body.max_tokens is None else token_limit(body.max_tokens),
            ignore_eos=bool(body.ignore_eos),
            speculation=body.speculation is not False,
            sparse=sparse_of(body.sparse_prefill),
            priority=body.priority or 0,
            cache_salt=body.salt,
            session=body.prompt_cache_key or "",
            cache_pin=bool(body.cache_pin),
            form=form,
        )
        requests += copies(first, body.n or 1)
    return requests


def _is_for_worker(body: Body, prompt: PromptText) -> bool:
    """Return whether an echo needs the worker: for `max_tokens` 0, logprobs, or the text of tokens."""
    return bool(body.echo) and (body.max_tokens == 0 or body.logprobs is not None or isinstance(prompt, list))


# --- to the client -----------------------------------------------------------------------------------


def echoes(body: Body) -> list[str | None]:
    """Return the text to echo for each choice, None for a prompt of tokens; empty if `echo` is not set."""
    if not body.echo:
        return []
    texts = [prompt if isinstance(prompt, str) else None for prompt in body.prompts]
    return [text for text in texts for _ in range(body.n or 1)]


class CompletionChoiceRenderer:
    """`answer.ChoiceRenderer` of completions."""

    def __init__(self, *, logprobs: bool, choices: int, echoes: Sequence[str | None] = ()) -> None:
        """`logprobs`: whether they were requested. `echoes`: the texts to echo, one per choice, or none."""
        self._logprobs = [LegacyLogprobs() if logprobs else None for _ in range(choices)]
        self._echoes = [Echo(text, scored=logprobs) for text in echoes]

    def add_prompt(self, choice: int, item: Accepted | PromptLogprobs) -> None:
        if self._echoes:
            self._echoes[choice].add_prompt(item)
            if self._logprobs[choice] is not None and isinstance(item, Accepted):
                self._logprobs[choice] = LegacyLogprobs(self._echoes[choice].characters)

    def opening(self, choice: int) -> bytes:
        text, logprobs = self._echoes[choice].take() if self._echoes else ("", None)
        return encode(_choice(choice, text, logprobs=logprobs)) if text or logprobs else b""

    def gain(self, choice: int, delta: Delta) -> bytes:
        logprobs = self._logprobs[choice]
        if logprobs is not None and delta.likelihoods:
            return encode(_choice(choice, delta.text, logprobs=logprobs.take(delta.likelihoods)))
        if not delta.text:
            return b""
        # Formatted by hand, since most events are of this kind.
        text = encode_text(delta.text)
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice, text)

    def closing(self, choice: int, reason: str) -> bytes:
        return encode(_choice(choice, "", reason=reason))

    def whole(self, choice: int, deltas: Sequence[Delta], reason: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        logprobs = self._logprobs[choice]
        likelihoods = [of for delta in deltas for of in delta.likelihoods]
        taken = None if logprobs is None else logprobs.take(likelihoods)
        before, echoed = self._echoes[choice].take() if self._echoes else ("", None)
        if taken and echoed:
            taken = {name: echoed[name] + taken[name] for name in taken}
        return _choice(choice, before + text, logprobs=taken, reason=reason)


def _choice(
    choice: int, text: str, *, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}


# --- `echo` of completions: the prompt's text before the answer and, with logprobs, its tokens -------
#
# Invariant: the pieces of text, joined, are exactly the prompt as sent. The offsets of tokens that are not in
# the text (a BOS that the tokenizer adds, normalized characters) are approximate.

SKIPPED_CHARACTERS_MAX = 8
"""How far ahead a token is searched for in the text if it is not at the expected offset."""


class Echo:
    """Echo of one choice's prompt. Each answer has its own, which is read once from the beginning."""

    def __init__(self, text: str | None, *, scored: bool) -> None:
        """`text`: None if the prompt was sent as tokens; the worker then reports the text. `scored`: whether
        tokens with logprobs were requested."""
        self._text = text
        self._scored = scored
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._due = 0
        self._tokens: list[PromptToken] = []
        self._given = 0
        self._at = 0

    @property
    def characters(self) -> int:
        """Length of the whole text, once the request is accepted."""
        return len(self._text or "")

    def add_prompt(self, item: Accepted | PromptLogprobs) -> None:
        """Accept the prompt's text, or the logprobs of more of its tokens."""
        if isinstance(item, PromptLogprobs):
            self._tokens += item.tokens
            return
        self._due = item.prompt_tokens
        if self._text is None:
            self._text = item.prompt

    def take(self) -> tuple[str, dict[str, Any] | None]:
        """Return the new text of the echo, and its `choices[].logprobs`."""
        text = self._text or ""
        if not self._scored:
            given, self._given = self._given, len(text)
            return text[given:], None
        tokens, self._tokens = self._tokens, []
        lists = legacy_lists(tokens, [self._place(text, token.bytes) for token in tokens])
        self._due -= len(tokens)
        given, self._given = self._given, self._at if self._due > 0 else len(text)
        return text[given : self._given], lists if tokens else None

    def _place(self, text: str, spelled: bytes) -> int:
        """Return the offset of the next token in the text, in characters."""
        piece = self._decoder.decode(spelled)
        if self._at == 0 and piece[:1] == " " and not text.startswith(" "):
            piece = piece[1:]  # many tokenizers prepend a space to every text
        begin = text.find(piece, self._at, self._at + len(piece) + SKIPPED_CHARACTERS_MAX)
        if begin < 0:
            return self._at
        self._at = begin + len(piece)
        return begin
