"""Complete application whose workers are played by a test."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from starlette.types import ASGIApp

from broker.api.batches.runner import BatchRunner, StoreThread
from broker.api.batches.store import BatchStore
from broker.app import create_app
from broker.dispatch.inspection import Inspection
from broker.middleware.auth import ApiKeys
from broker.middleware.limits import KeyConcurrency
from broker.middleware.media_memory import MediaMemory
from broker.requests.recovery import recover
from broker.state import Fetch, GatewayState, journal_at
from broker.transport.router import RouterLink
from protocol.messages import Cancel, Generate, Message
from protocol.settings.gateway import GatewaySettings
from tests.broker.asgi import Exchange, until
from tests.broker.dispatcher_line import Line
from tests.factories import accepted, events, finished, reused

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

SAID = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    TEXT: {"prompt": "hello"},
    MESSAGES: {"messages": SAID, "max_tokens": 16},
    RESPONSES: {"input": "hello"},
}


class MemoryLink:
    """Link without sockets, with the methods that the application uses."""

    def __init__(self) -> None:
        self.touch: list[Callable[..., object]] = []
        self.closed = False
        self.errors: Counter[str] = Counter()

    def start(self, on_message: Callable[..., None], lost: Callable[..., None]) -> None:
        self.touch = [on_message, lost]

    def close(self) -> None:
        self.closed = True

    def send(self, peer: str, message: Message, media: Sequence[bytes] = ()) -> bool:
        raise AssertionError("only the dispatcher sends")


class House:
    """Application whose workers are played by the test."""

    def __init__(
        self,
        *,
        per_key_max: int | None = None,
        waiting_max: int = 1,
        fetch: Fetch | None = None,
        journal: Path | None = None,
        **configured: Any,
    ) -> None:
        self.line = Line(waiting_max=waiting_max)
        self.line.clock.now = time.monotonic()
        self.link = MemoryLink()
        settings = GatewaySettings(**{"keepalive_s": 60.0, **configured})
        self.gateway = GatewayState(
            settings=settings,
            dispatcher=self.line.dispatcher,
            line_errors=self.link.errors,
            api_keys_store=ApiKeys(settings.api_keys),
            key_concurrency=KeyConcurrency(per_key_max),
            inspection=Inspection() if settings.inspect else None,
            media=MediaMemory(settings.media_memory),
            fetch=fetch,
            batches=self._batches(settings),
            journal=journal_at(journal and journal / "journal" / "journal.sqlite", settings),
        )
        self.app: ASGIApp = create_app(self.gateway, cast(RouterLink, self.link))

    def _batches(self, settings: GatewaySettings) -> BatchRunner | None:
        """Return a runner of batches in the folder of the settings; None if they name none."""
        if settings.batch_dir is None:
            return None
        thread = StoreThread(BatchStore(settings.batch_dir, settings.batch_storage))
        return BatchRunner(thread, time.time, line_bytes_max=settings.body_bytes_max, retention_s=86400)

    def recover(self) -> None:
        """Read and start the journal, as the lifespan does. Call this on the event loop."""
        recover(self.gateway)
        loop = asyncio.get_running_loop()

        def on_commit() -> None:
            loop.call_soon_threadsafe(self.gateway.answers.on_committed)

        self.gateway.journal.start(on_commit)

    def die(self) -> None:
        """End as if killed, but with everything on the disk."""
        self.gateway.answers.flush()
        self.gateway.journal.close()
        self.close()

    def close(self) -> None:
        """Release the resources that the lifespan's shutdown would, for tests that run no lifespan."""
        self.gateway.offload.close()

    def get(self, path: str, method: str = "GET", **headers: str) -> Exchange:
        given = [
            (name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()
        ]
        return Exchange(self.app, method, path, headers=given)

    def chat(self, content: object = "hello", **fields: object) -> Exchange:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return Exchange(self.app, "POST", CHAT, json.dumps(body).encode())

    def text(self, prompt: object = "Once", **fields: object) -> Exchange:
        return Exchange(self.app, "POST", TEXT, json.dumps({"prompt": prompt, **fields}).encode())

    def respond(self, input: object = "hello", *, key: str = "", **fields: object) -> Exchange:
        headers = [(b"x-api-key", key.encode())] if key else []
        return Exchange(
            self.app, "POST", RESPONSES, json.dumps({"input": input, **fields}).encode(), headers=headers
        )

    def keyed(self, path: str, idempotency_key: str, key: str = "", **body: object) -> Exchange:
        """Post with an `Idempotency-Key`. `key`: the API key."""
        headers = [(b"idempotency-key", idempotency_key.encode())]
        headers += [(b"x-api-key", key.encode())] if key else []
        return Exchange(self.app, "POST", path, json.dumps(body).encode(), headers=headers)

    def post(self, path: str, **body: object) -> Exchange:
        return Exchange(self.app, "POST", path, json.dumps(body).encode())

    def message(self, content: object = "hello", **fields: object) -> Exchange:
        body = {"max_tokens": 16, "messages": [{"role": "user", "content": content}], **fields}
        return self.post(MESSAGES, **body)

    def requests(self, worker: str = "w") -> list[Generate]:
        return [m for to, m in self.line.sent if to == worker and isinstance(m, Generate)]

    def cancels(self, worker: str = "w") -> list[str]:
        return [m.id for to, m in self.line.sent if to == worker and isinstance(m, Cancel)]

    async def serve(self, exchange: Exchange, *texts: str, cached: int = 0) -> Exchange:
        """Answer an exchange that has just begun, with one token for each text, and return it at its end."""
        id = await self.arrived(len(self.requests()) + 1)
        self.begin(id, *texts, cached=cached)
        self.line.say("w", finished("w", id, len(texts), cached))
        return await exchange.end()

    def begin(self, id: str, *texts: str, cached: int = 0) -> None:
        """Accept a request, and send one token for each text."""
        self.line.say("w", accepted("w", id), reused("w", id, cached), events("w", id, *texts))

    async def arrived(self, number: int = 1) -> str:
        """Wait until `number` requests have reached the worker, and return the last one's id."""
        await until(lambda: len(self.requests()) >= number)
        return self.requests()[-1].id


def house_with_worker(
    model: str = "org/model", *, rows: int = 4, images: bool = False, **configured: Any
) -> House:
    """Return an application with the worker `w`."""
    house = House(**configured)
    house.line.serving("w", model, rows=rows, images=images)
    return house
