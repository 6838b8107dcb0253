"""Requests in flight at the worker: from the pool to the model thread, until their end is sent."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Sequence

from protocol.common.log_context import about
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Failed, Finished, Message, Request, failed
from protocol.types import Usage
from worker.core.commands import Abort, Submit, SubmitTexts
from worker.gateway.model_thread import ModelThread
from worker.input.pool import Outcome
from worker.values import EngineRequest, PreparedTexts, Tokenized

log = logging.getLogger(__name__)


class Requests:
    """Requests in flight; `len` is their number. Used on the I/O thread only."""

    def __init__(
        self,
        incarnation: str,
        *,
        model: ModelThread,
        send: Callable[[Message], None],
        wake: Callable[[], None],
    ) -> None:
        """`send`: sends to the gateway; `wake`: called on a pool thread when `pass_on` should be called."""
        self._incarnation = incarnation
        self._model = model
        self._send = send
        self._wake = wake
        self._prepared: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()
        self._preparing: set[str] = set()
        self._open: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: object) -> bool:
        return id in self._open

    @property
    def preparing(self) -> int:
        """Number of requests that have not reached the model thread yet."""
        return len(self._preparing)

    def take(self, request: Request, media: Sequence[bytes]) -> None:
        """Prepare a request, or refuse it at once."""
        if request.id in self._open:
            # A duplicate: the gateway receives the output of the first one.
            log.warning("%s: duplicate request ignored", request.id, extra=about(request.id))
            return
        self._open.add(request.id)
        pool = self._model.pool
        if pool is None:
            self._refuse(request.id, RequestError(Code.MODEL_LOADING))
            return
        self._preparing.add(request.id)
        try:
            self._model.require(request)
            pool.prepare(self._model.with_adapter(request), media, self._on_prepared)
        except RequestError as error:
            self._preparing.discard(request.id)
            self._refuse(request.id, error)

    def _on_prepared(self, id: str, outcome: Outcome) -> None:
        self._prepared.put((id, outcome))
        self._wake()

    def cancel(self, id: str) -> None:
        """Cancel a request."""
        if id in self._preparing and self._model.pool is not None:
            self._model.pool.cancel(id)
        self._preparing.discard(id)
        self._open.discard(id)
        self._model.inbox.put(Abort(id))

    def abandon(self) -> None:
        """Cancel all requests."""
        for id in [*self._open]:
            self.cancel(id)

    def sent(self, messages: Iterable[Message]) -> None:
        """Note messages that were sent to the gateway."""
        self._open.difference_update(each.id for each in messages if isinstance(each, Finished | Failed))

    def pass_on(self) -> None:
        """Pass prepared requests to the model thread, and results or errors to the gateway."""
        while not self._prepared.empty():
            id, outcome = self._prepared.get()
            if id not in self._preparing:
                continue  # cancelled meanwhile
            self._preparing.discard(id)
            match outcome:
                case RequestError():
                    self._refuse(id, outcome)
                case Tokenized():
                    self._tell_tokens(outcome)
                case PreparedTexts():
                    self._accept(id, outcome.tokens)
                    self._model.inbox.put(SubmitTexts(outcome))
                case EngineRequest():
                    self._accept(id, len(outcome.tokens), outcome.echo_text, outcome.relaxed)
                    self._model.inbox.put(Submit(outcome))

    def _accept(self, id: str, tokens: int, prompt: str = "", relaxed: Sequence[str] = ()) -> None:
        incarnation = self._incarnation
        self._send(
            Accepted(
                incarnation=incarnation, id=id, prompt_tokens=tokens, prompt=prompt, relaxed=list(relaxed)
            )
        )

    def _tell_tokens(self, told: Tokenized) -> None:
        self._send(
            Accepted(
                incarnation=self._incarnation,
                id=told.id,
                prompt_tokens=told.count,
                prompt=told.text,
                tokens=list(told.tokens),
                pieces=list(told.pieces),
            )
        )
        usage = Usage(prompt_tokens=told.count, completion_tokens=0)
        self._send(Finished(incarnation=self._incarnation, id=told.id, reason="stop", usage=usage))

    def _refuse(self, id: str, error: RequestError) -> None:
        self._send(failed(self._incarnation, id, error))
