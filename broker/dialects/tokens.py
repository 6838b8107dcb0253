"""vLLM's /tokenize and /detokenize: body -> a `Generate` that is not run, and what is told of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from broker.dialects.answer import failure_in
from broker.dialects.body import decode, encode
from broker.dispatch.flight import Batch
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Finished, Generate
from protocol.parts import Sampling, Token, Tokenizing


class Tokenize(Struct, kw_only=True):
    """A text or a conversation. What else makes the prompt of a conversation is read as chat has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Raw = field(default_factory=Raw)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @property
    def is_chat(self) -> bool:
        return bytes(self.messages) not in (b"", b"null")


class Detokenize(Struct, kw_only=True):
    tokens: list[Token]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(Tokenize)
_detokenize_decoder = msgspec.json.Decoder(Detokenize)


def read_tokenize(raw: bytes) -> Tokenize:
    """Bytes -> a checked body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_tokenize_decoder, raw)
    if (body.prompt is None) != body.is_chat:
        message = "Either 'prompt' or 'messages' is required, and not both."
        raise RequestError(Code.INVALID_REQUEST, message, param="prompt")
    return body


def read_detokenize(raw: bytes) -> Detokenize:
    """Bytes -> a checked body. Raises `RequestError` naming the parameter at fault."""
    return decode(_detokenize_decoder, raw)


def tokenize(body: Tokenize, asked: Generate) -> Generate:
    """What the worker is asked. `asked`: a request that would be run, of the conversation or of no prompt."""
    wanted = Tokenizing(
        tokens=True,
        pieces=bool(body.return_token_strs),
        special=body.add_special_tokens,
        opens_turn=body.add_generation_prompt is not False or bool(body.continue_final_message),
    )
    return replace(asked, prompt=body.prompt, tokenizing=wanted)


def detokenize(body: Detokenize, asked: Generate) -> Generate:
    """What the worker is asked. `asked`: a request without a prompt."""
    return replace(asked, tokens=body.tokens, source="tokens", echo=True, tokenizing=Tokenizing())


def unprompted(*, id: str, incarnation: str) -> Generate:
    """A request that has no prompt yet."""
    return Generate(incarnation=incarnation, id=id, sampling=Sampling(seed=0))


class Counted:
    """The `Renderer` of what is only counted: one JSON document, of what the worker says when it accepts
    it."""

    content_type = b"application/json"

    def __init__(self, document: Callable[[Accepted], dict[str, Any]]) -> None:
        self.over = False
        self._document = document
        self._told: Accepted | None = None

    def wait(self) -> bytes:
        """Nothing: it comes in one piece."""
        return b""

    def feed(self, batches: Sequence[Batch]) -> bytes:
        """The document once it is complete, nothing before."""
        if error := failure_in(batches):
            raise error
        for item in (item for _, items in batches for item in items):
            match item:
                case Accepted():
                    self._told = item
                case Finished() if self._told is not None:
                    self.over = True
                    return encode(self._document(self._told))
        return b""


def tokenized(told: Accepted, *, context_length: int, pieces: bool) -> dict[str, Any]:
    """The answer to /tokenize. `pieces`: they were asked for."""
    return {
        "count": told.prompt_tokens,
        "max_model_len": context_length,
        "tokens": told.tokens,
        "token_strs": told.pieces if pieces else None,
    }
