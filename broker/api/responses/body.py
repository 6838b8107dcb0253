"""Body of OpenAI's responses: types, and the checks before dispatch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from broker.dialects.body import check_range, decode, refuse
from broker.dialects.parameters import TOP_LOGPROBS_MAX, Parameters, check, check_max_tokens
from protocol.errors import Code, RequestError

LOGPROBS = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"

FORMATS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "grammar",
)  # fmt: skip
_ELSEWHERE = {
    "prompt": "is not supported: no prompt templates are stored here; send the text in 'input'",
    **dict.fromkeys(FORMATS, "is not a parameter of responses: use 'text.format'"),
}


class Format(Struct):
    """Output format. Unless `strict`, what cannot be enforced of a schema is relaxed. `name` has no
    effect."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: Raw = field(default_factory=Raw)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Text(Struct):
    format: Format | None = None
    verbosity: str | None = None


class ConversationParam(Struct):
    id: str


class Body(Parameters, kw_only=True):
    """Body fields beside the shared ones. Other fields are ignored."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: Text | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    background: bool | None = None
    conversation: str | ConversationParam | None = None
    prompt: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    grammar: Any = None

    @property
    def logprobs(self) -> int | None:
        """Number of top logprobs per token; None: no logprobs."""
        asked = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if asked else None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response continues and extends."""
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    @property
    def is_sealed(self) -> bool:
        """Whether `encrypted_content` of reasoning was requested, which a client can send back."""
        return SEALED_THOUGHTS in (self.include or ())


_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Decode and check a body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_decoder, raw)
    for name, why in _ELSEWHERE.items():
        if getattr(body, name):
            raise refuse(name, why)
    if body.background and body.store is False:
        raise refuse("background", "needs 'store' to be true: the response is read by its id")
    if body.input is None:
        raise RequestError(Code.INVALID_REQUEST, "'input' is required.", param="input")
    if body.conversation and body.previous_response_id:
        message = "'conversation' and 'previous_response_id' exclude each other."
        raise RequestError(Code.INVALID_REQUEST, message, param="conversation")
    check(body)
    check_max_tokens("max_output_tokens", body.max_output_tokens)
    check_range("top_logprobs", body.top_logprobs, 0, TOP_LOGPROBS_MAX)
    check_range("max_tool_calls", body.max_tool_calls, 1, 2**31)
    return body
