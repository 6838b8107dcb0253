"""Body of OpenAI's responses: types, and the checks before dispatch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from broker.dialects.body import PositiveInt, UnsupportedField, decode, extra_schema, refer, refuse, wrong
from broker.dialects.parameters import MaxTokens, Parameters, TopLogprobs, check, check_max_tokens
from broker.dialects.response_format import RawSchema

LOGPROBS = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"

ITEM = "Item"
RawItem = Annotated[dict[str, Any], extra_schema(**refer(ITEM))]
"""An item, which `items` reads."""
ToolChoiceName = Annotated[str, extra_schema(enum=["none", "auto", "required"])]
_CHOICES = {"type": {"enum": ["function", "custom", "allowed_tools"]}}
ToolChoiceObject = Annotated[dict[str, Any], extra_schema(properties=_CHOICES, required=["type"])]

_FORMATS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "grammar",
)  # fmt: skip
_ELSEWHERE = {
    "prompt": "is not supported: no prompt templates are stored here; send the text in 'input'",
    **dict.fromkeys(_FORMATS, "is not a parameter of responses: use 'text.format'"),
}


class Format(Struct):
    """Output format. Unless `strict`, what cannot be enforced of a schema is relaxed. `name` has no
    effect."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: RawSchema = field(default_factory=Raw)
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

    input: str | list[RawItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceName | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: PositiveInt | None = None
    text: Text | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    background: bool | None = None
    conversation: str | ConversationParam | None = None
    prompt: UnsupportedField = None
    response_format: UnsupportedField = None
    structured_outputs: UnsupportedField = None
    guided_json: UnsupportedField = None
    guided_regex: UnsupportedField = None
    guided_choice: UnsupportedField = None
    guided_grammar: UnsupportedField = None
    json_schema: UnsupportedField = None
    grammar: UnsupportedField = None

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
    if body.conversation and body.previous_response_id:
        raise wrong("conversation", "and 'previous_response_id' exclude each other")
    check(body)
    check_max_tokens(body, "max_tokens", "max_output_tokens")
    return body
