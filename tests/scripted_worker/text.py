"""Preparer and output processor of the scripted engine, whose tokens are whole words."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.conversation import unpack
from protocol.errors import Code, RequestError, too_long
from protocol.messages import Generate
from protocol.types import CallDelta, TokenizeOptions
from tests.scripted_worker.engine import END, WORDS
from tests.scripted_worker.eyes import seen
from tests.scripted_worker.pictures import IMAGE_TOKENS, pictures_in, with_keys
from tests.scripted_worker.script import Script
from worker.values import NEVER, CancelToken, EngineRequest, OutputDelta, SamplingParams, Tokenized

CONTEXT_LENGTH = 8192
WORDS_BEFORE_CALLS = 2
CALL_TOKENS = 5
"""Tokens of a tool call: its name, and the words of its arguments."""
CALL_NAME, CALL_OPENING, CALL_CLOSING = "note", '{"words": "', '"}'


@dataclass(frozen=True, slots=True)
class FakePrepared(EngineRequest):
    """Request that keeps its script alive, as a row may be dropped and started again."""

    script: Script = field(default_factory=Script)


@dataclass(slots=True)
class FakePreparer:
    scripts: MutableMapping[str, Script]
    context_length: int

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        text = _text(request)
        if request.suffix:
            raise RequestError(
                Code.UNSUPPORTED_PARAMETER, "This model does not support 'suffix'.", param="suffix"
            )
        script = Script.read(text)
        if script.bad:
            raise ValueError("scripted: cannot be prepared")
        messages = unpack(request).messages or []
        script = replace(script, seen=tuple(seen(messages, request.media, media)))
        images = pictures_in(messages, request.media, media, script)
        tokens = with_keys(_tokens(request, text), images) or (1,)
        room = self.context_length - len(tokens)
        if room < 1:
            by_memory = self.context_length < CONTEXT_LENGTH
            source = request.source or "messages"
            raise too_long(self.context_length, len(tokens), source, by_memory=by_memory)
        # A request received twice is one request: its row follows the first script.
        script = self.scripts.setdefault(request.id, script)
        return FakePrepared(
            id=request.id,
            tokens=tokens,
            sampling=SamplingParams(
                seed=request.sampling.seed,
                temperature=request.sampling.temperature or 0.0,
                logprobs=request.sampling.logprobs,
            ),
            stop=tuple(request.stop),
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            end_tokens=frozenset() if request.ignore_eos else frozenset((END,)),
            priority=request.priority,
            deadline_s=request.deadline_s,
            salt=request.cache_salt,
            pin=request.cache_pin,
            resume=tuple(request.resume),
            echo=request.echo,
            scored=request.scored,
            echo_text=_echo_text(request),
            images=images,
            script=script,
        )

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        wanted, text = request.tokenizing or TokenizeOptions(), _text(request)
        tokens = (*_tokens(request, text), *(1,) * IMAGE_TOKENS * len(request.media))
        return Tokenized(
            id=request.id,
            count=len(tokens),
            tokens=tokens if wanted.tokens else (),
            pieces=tuple(text.split()) if wanted.pieces else (),
            text=_echo_text(request),
        )


def _text(request: Generate) -> str:
    return request.prompt or "\n".join(_texts(unpack(request).messages or []))


def _tokens(request: Generate, text: str) -> tuple[int, ...]:
    return tuple(request.tokens or ()) or tuple(1 + len(word) for word in text.split())


def _echo_text(request: Generate) -> str:
    return "".join(map(_word, request.tokens)) if request.echo and request.tokens else ""


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        texts += map(str, parts)
    return texts


def _word(token: int) -> str:
    return WORDS[(token - 1) % len(WORDS)] + " "


@dataclass(slots=True)
class FakePipeline:
    """Output processor without buffering, as tokens are whole words, and without stop strings. The order is
    reasoning, words for images, some words, tool calls, more words."""

    script: Script
    request: str = ""
    _answered: int = field(default=0, init=False)
    stopped: bool = False
    reasoning_tokens: int = 0
    has_called: bool = False
    stop_string: str = ""

    def push(self, token: int) -> OutputDelta:
        if self.reasoning_tokens < self.script.think:
            self.reasoning_tokens += 1
            return OutputDelta(reasoning=self._said(token), is_content=False)
        number, self._answered = self._answered, self._answered + 1
        if number < len(self.script.seen):
            return OutputDelta(self.script.seen[number] + " ")
        call, place = divmod(number - len(self.script.seen) - WORDS_BEFORE_CALLS, CALL_TOKENS)
        if not 0 <= call < self.script.call:
            return OutputDelta(self._said(token))
        return OutputDelta(is_content=False, calls=(self._called(call, place, token),))

    def _called(self, call: int, place: int, token: int) -> CallDelta:
        """Return the delta of a tool call: its name, then words of its arguments, then their end."""
        if place == 0:
            # The same id for all attempts of a flight, as the client may have it already.
            request, _, _ = self.request.partition("~")
            id = f"call_{request}_{call}"
            return CallDelta(index=call, id=id, name=CALL_NAME, arguments=CALL_OPENING)
        self.has_called = self.has_called or place == CALL_TOKENS - 1
        said = json.dumps(self._said(token), ensure_ascii=False)[1:-1]
        return CallDelta(index=call, arguments=said + (CALL_CLOSING if place == CALL_TOKENS - 1 else ""))

    def flush(self, *, has_ended: bool = False) -> OutputDelta:
        return OutputDelta()

    def spell(self, token: int) -> bytes:
        return b"" if token == END else self._said(token).encode()

    def _said(self, token: int) -> str:
        if self.script.clock:
            return f"{time.monotonic_ns()} "
        return self.script.text if self.script.text is not None else _word(token)
