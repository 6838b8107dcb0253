"""Lines of batches as requests: through the same routes as requests of clients, without a connection.

`RequestContext.is_batch_line` marks them.
"""

from __future__ import annotations

from starlette.types import ASGIApp

from broker.api.batches.lines import Line, LineAnswer
from broker.api.batches.records import BatchRecord
from broker.api.batches.runner import Send
from broker.dialects import anthropic, openai
from broker.dialects.body import encode
from broker.dispatch.dispatcher import Dispatcher
from broker.middleware.context import RequestContext, new_request_id
from broker.requests import internal_request
from broker.state import GatewayState
from protocol.errors import Code, RequestError

SPARE_SHARE = 0.5
"""Lines in flight beyond the rows of the workers, so that the next ones are prepared when a row is free."""


def places(dispatcher: Dispatcher) -> int:
    """Return how many lines may be in flight: enough to fill the workers."""
    if dispatcher.stopping:
        return 0
    rows = sum(worker.ready.running_max for worker in dispatcher.fleet if worker.serves and worker.ready)
    return max(1, rows + int(rows * SPARE_SHARE))


def sender(gateway: GatewayState, app: ASGIApp) -> Send:
    """Return the function that sends lines to `app`, with an API key of the batch's owner."""

    async def send(batch: BatchRecord, line: Line) -> LineAnswer:
        key = None
        if batch.owner or gateway.api_keys_store.required:
            key = gateway.api_keys_store.of_namespace(batch.owner)
            if key is None:
                return _refused(batch)
        with gateway.media.lease() as media:
            context = RequestContext(new_request_id(), media, key=key, is_batch_line=True)
            status, body = await internal_request.post(app, batch.endpoint, line.body, context)
        return LineAnswer(status, context.id, body)

    return send


def _refused(batch: BatchRecord) -> LineAnswer:
    error = RequestError(Code.INVALID_API_KEY, "The API key that created this batch is no longer valid.")
    is_anthropic = batch.dialect == "anthropic"
    document = anthropic.error_object(error) if is_anthropic else openai.error_object(error)
    return LineAnswer(error.kind.status, "", encode(document))
