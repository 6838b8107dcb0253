"""vLLM's /tokenize and /detokenize: body -> a `Generate` without generation, and its prompt -> a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from broker.dialects.body import decode, encode
from broker.dialects.renderers import DocumentRenderer
from broker.dispatch.flight import Item
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Finished, Generate
from protocol.types import Sampling, Token, TokenizeOptions


class Tokenize(Struct, kw_only=True):
    """Body of /tokenize: a text or a conversation. Other fields of a conversation are read as in chat."""

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
    """Body of /detokenize."""

    tokens: list[Token]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(Tokenize)
_detokenize_decoder = msgspec.json.Decoder(Detokenize)


def read_tokenize(raw: bytes) -> Tokenize:
    """Decode and check a body of /tokenize. Raises `RequestError` naming the parameter at fault."""
    body = decode(_tokenize_decoder, raw)
    if (body.prompt is None) != body.is_chat:
        message = "Exactly one of 'prompt' and 'messages' is required."
        raise RequestError(Code.INVALID_REQUEST, message, param="prompt")
    return body


def read_detokenize(raw: bytes) -> Detokenize:
    """Decode and check a body of /detokenize. Raises `RequestError` naming the parameter at fault."""
    return decode(_detokenize_decoder, raw)


def tokenize(body: Tokenize, asked: Generate) -> Generate:
    """Make a tokenize-only request. `asked`: a request with the conversation, or one without a prompt."""
    wanted = TokenizeOptions(
        tokens=True,
        pieces=bool(body.return_token_strs),
        special=body.add_special_tokens,
        opens_turn=body.add_generation_prompt is not False or bool(body.continue_final_message),
    )
    return replace(asked, prompt=body.prompt, tokenizing=wanted)


def detokenize(body: Detokenize, asked: Generate) -> Generate:
    """Make a detokenize request. `asked`: a request without a prompt."""
    return replace(asked, tokens=body.tokens, source="tokens", echo=True, tokenizing=TokenizeOptions())


def unprompted(*, id: str, incarnation: str) -> Generate:
    """Make a request without a prompt."""
    return Generate(incarnation=incarnation, id=id, sampling=Sampling(seed=0))


class TokenizeRenderer(DocumentRenderer):
    """Renderer of tokenize and detokenize answers: one JSON document, made from `Accepted`."""

    def __init__(self, make: Callable[[Accepted], dict[str, Any]]) -> None:
        super().__init__()
        self._make = make
        self._accepted: Accepted | None = None

    def collect(self, choice: int, item: Item) -> None:
        match item:
            case Accepted():
                self._accepted = item
            case Finished():
                self.over = self._accepted is not None

    def document(self) -> bytes:
        assert self._accepted is not None
        return encode(self._make(self._accepted))


def tokenized(accepted: Accepted, *, context_length: int, pieces: bool) -> dict[str, Any]:
    """Return the answer to /tokenize. `pieces`: whether the token strings are included."""
    return {
        "count": accepted.prompt_tokens,
        "max_model_len": context_length,
        "tokens": accepted.tokens,
        "token_strs": accepted.pieces if pieces else None,
    }
