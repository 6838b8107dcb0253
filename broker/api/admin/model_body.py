"""Body of /v1/models/load and its like: the model."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from broker.dialects.body import decode


class ModelChoice(Struct, kw_only=True):
    """`model`: name or alias. `stream`: report each change as an event, until the order is carried out."""

    model: str
    stream: bool | None = None


_decoder = msgspec.json.Decoder(ModelChoice)


def read_choice(raw: bytes) -> ModelChoice:
    """Decode a body. Raises `RequestError` naming the parameter at fault."""
    return decode(_decoder, raw)
