"""The requests that a worker has taken: by way of the pool to the model thread, until their end is said."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Sequence

from protocol.about import about
from protocol.errors import Code, RequestError
from protocol.messages import Accepted, Failed, Finished, Message, Request, failed
from protocol.parts import Usage
from worker.contract import Prepared, Tokenized
from worker.line.modelthread import ModelThread
from worker.line.pool import Outcome
from worker.schedule.commands import Drop, Encode, Submit
from worker.texts import PreparedTexts

log = logging.getLogger(__name__)


class Requests:
    """Used on the I/O thread only. `len`: of how many the end has not been said."""

    def __init__(
        self,
        incarnation: str,
        *,
        model: ModelThread,
        say: Callable[[Message], None],
        wake: Callable[[], None],
    ) -> None:
        """`say`: to the gateway; `wake`: called on the pool's threads when `pass_on` has something to do."""
        self._incarnation = incarnation
        self._model = model
        self._say = say
        self._wake = wake
        self._prepared: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()
        self._preparing: set[str] = set()
        self._open: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def preparing(self) -> int:
        """How many the model thread has not heard of yet."""
        return len(self._preparing)

    def take(self, request: Request, media: Sequence[bytes]) -> None:
        """It is prepared, or refused at once."""
        if request.id in self._open:
            # Its one flight hears from the first.
            log.warning("%s: is here already", request.id, extra=about(request.id))
            return
        self._open.add(request.id)
        pool = self._model.pool
        if pool is None:
            self._refuse(request.id, RequestError(Code.MODEL_LOADING))
            return
        try:
            self._model.require(request)
        except RequestError as error:
            self._refuse(request.id, error)
            return
        self._preparing.add(request.id)
        pool.prepare(request, media, self._on_prepared)

    def _on_prepared(self, id: str, outcome: Outcome) -> None:
        self._prepared.put((id, outcome))
        self._wake()

    def cancel(self, id: str) -> None:
        """Nobody waits for it any more."""
        self._preparing.discard(id)
        self._open.discard(id)
        self._model.inbox.put(Drop(id))

    def abandon(self) -> None:
        """Nobody waits for any of them."""
        self._preparing.clear()
        self._open.clear()
        self._model.inbox.put(Drop(None))

    def sent(self, messages: Iterable[Message]) -> None:
        """The gateway has been told these."""
        self._open.difference_update(each.id for each in messages if isinstance(each, Finished | Failed))

    def pass_on(self) -> None:
        """What has been prepared, to the model thread, or back to where it came from."""
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
                    self._model.inbox.put(Encode(outcome))
                case Prepared():
                    self._accept(id, len(outcome.tokens), outcome.echo_text)
                    self._model.inbox.put(Submit(outcome))

    def _accept(self, id: str, tokens: int, prompt: str = "") -> None:
        self._say(Accepted(incarnation=self._incarnation, id=id, prompt_tokens=tokens, prompt=prompt))

    def _tell_tokens(self, told: Tokenized) -> None:
        self._say(
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
        self._say(Finished(incarnation=self._incarnation, id=told.id, reason="stop", usage=usage))

    def _refuse(self, id: str, error: RequestError) -> None:
        self._say(failed(self._incarnation, id, error))
