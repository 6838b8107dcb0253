"""What a renderer is made of, as values that can be stored: the same values render the same bytes again.

A route makes one of these from its body. The gateway renders with it at once; a later gateway, which has only
the values, renders what the first one would have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from broker.api.chat import chat
from broker.api.completions import completions
from broker.api.messages.answer import MessageDocumentRenderer, MessageSseRenderer, message
from broker.api.responses.answer import (
    Document,
    ResponseBuilder,
    ResponseDocumentRenderer,
    ResponseSseRenderer,
)
from broker.api.responses.output import OutputStyle, ResponseOutput
from broker.dialects import choices as answer
from broker.dialects.renderers import Renderer


class _Rendering(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """`id`: of the answer. `created`: in seconds since 1970."""

    id: str
    model: str
    created: int
    stream: bool = False


class _ChoicesRendering(_Rendering, frozen=True, kw_only=True, omit_defaults=True):
    """An answer in choices. `prompts`: number of prompts, with equally many choices each."""

    choices: int = 1
    prompts: int = 1
    logprobs: bool = False
    include_usage: bool = False

    def _renderer(self, kind: str, form: answer.ChoiceRenderer, fingerprint: Callable[[], str]) -> Renderer:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}

        def envelope() -> dict[str, Any]:
            return head | {"system_fingerprint": fingerprint()}

        if not self.stream:
            return answer.ChoiceDocumentRenderer(envelope, form, choices=self.choices, prompts=self.prompts)
        return answer.ChoiceSseRenderer(
            envelope, form, choices=self.choices, prompts=self.prompts, include_usage=self.include_usage
        )


class ChatRendering(_ChoicesRendering, frozen=True, kw_only=True, omit_defaults=True):
    functions: bool = False
    customs: frozenset[str] = frozenset()

    def renderer(self, fingerprint: Callable[[], str]) -> Renderer:
        kind = "chat.completion.chunk" if self.stream else "chat.completion"
        form = chat.ChatChoiceRenderer(logprobs=self.logprobs, functions=self.functions, customs=self.customs)
        return self._renderer(kind, form, fingerprint)


class TextRendering(_ChoicesRendering, frozen=True, kw_only=True, omit_defaults=True):
    """`echoes`: the prompt of each choice, None for one that was sent as tokens; empty without `echo`."""

    echoes: list[str | None] = []

    def renderer(self, fingerprint: Callable[[], str]) -> Renderer:
        form = completions.CompletionChoiceRenderer(
            logprobs=self.logprobs, choices=self.choices, echoes=self.echoes
        )
        return self._renderer("text_completion", form, fingerprint)


class MessageRendering(_Rendering, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str = ""

    def renderer(self, fingerprint: Callable[[], str]) -> Renderer:
        begun = message(self.id, self.model)
        return MessageSseRenderer(begun, self.request_id) if self.stream else MessageDocumentRenderer(begun)


class ResponseRendering(_Rendering, frozen=True, kw_only=True, omit_defaults=True):
    """`envelope`: the JSON document of the response before its output. `stem`: the unique part of its id."""

    stem: str
    envelope: bytes
    style: OutputStyle = OutputStyle()
    background: bool = False

    def builder(
        self, clock: Callable[[], float], keep: Callable[[Document], None] | None = None
    ) -> ResponseBuilder:
        # Kept raw: schemas keep the spelling of their client.
        envelope: Document = dict(_envelopes.decode(self.envelope))
        output = ResponseOutput(self.stem, self.style)
        return ResponseBuilder(envelope, output, clock=clock, keep=keep, in_background=self.background)

    def of(self, builder: ResponseBuilder) -> Renderer:
        """Return the renderer of what `builder` builds: always of events in the background."""
        is_streamed = self.stream or self.background
        return ResponseSseRenderer(builder) if is_streamed else ResponseDocumentRenderer(builder)


_envelopes: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

Rendering = ChatRendering | TextRendering | MessageRendering | ResponseRendering
