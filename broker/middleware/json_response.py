"""Response with a JSON document, encoded as all bodies are."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from broker.dialects.body import encode


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)
