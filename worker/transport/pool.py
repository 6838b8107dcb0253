"""Thread pool for chat templates and tokenization; each thread has its own tokenizer.

A Hugging Face tokenizer used by two threads at once fails with "Already borrowed".
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from protocol.errors import Code, RequestError
from protocol.log_context import about
from protocol.messages import Request
from protocol.tasks import runs_nothing
from worker.contract.engine import EngineRequest, Preparer, Tokenized
from worker.contract.texts import PreparedTexts, TextsPreparer

log = logging.getLogger(__name__)

THREADS = 2
WARM_S_MAX = 10.0
PREPARE_S_MAX = 600.0
"""Maximum seconds of work on one request. If all threads exceed it, no request can be prepared, and the
worker exits."""

Outcome = EngineRequest | PreparedTexts | Tokenized | RequestError
_AnyPreparer = Preparer | TextsPreparer


class PreparerPool:
    """Prepares requests beside the I/O thread."""

    def __init__(self, open_preparer: Callable[[], _AnyPreparer]) -> None:
        """`open_preparer` is called once on each thread. Requests must be of its model's task."""
        self._own = threading.local()
        self._open = open_preparer
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self._began: dict[int, float] = {}
        """By thread, when it began its current request."""

    def warm(self) -> None:
        """Open every thread's preparer in advance. After a failure, the first request tries again and reports
        the error."""
        together = threading.Barrier(THREADS)  # so that each thread takes one task
        futures = [self._executor.submit(self._warm, together) for _ in range(THREADS)]
        wait(futures, timeout=WARM_S_MAX)

    def _warm(self, together: threading.Barrier) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(WARM_S_MAX)
        try:
            self._preparer()
        except Exception:  # the request boundary: reported with the first request
            log.debug("a preparer cannot be opened", exc_info=True)

    def _preparer(self) -> _AnyPreparer:
        if not hasattr(self._own, "preparer"):
            self._own.preparer = self._open()
        preparer: _AnyPreparer = self._own.preparer
        return preparer

    def prepare(self, request: Request, media: Sequence[bytes], done: Callable[[str, Outcome], None]) -> None:
        """Prepare a request; `done(id, outcome)` is called on a thread of the pool."""
        self._executor.submit(self._run, request, media, done)

    def is_stuck(self, now: float) -> bool:
        """Return whether every thread exceeds `PREPARE_S_MAX`. `now`: the monotonic clock."""
        began = list(self._began.values())
        return len(began) == THREADS and now - max(began) > PREPARE_S_MAX

    def _run(self, request: Request, media: Sequence[bytes], done: Callable[[str, Outcome], None]) -> None:
        self._began[threading.get_ident()] = time.monotonic()
        try:
            outcome = self._outcome(request, media)
        finally:
            del self._began[threading.get_ident()]
        done(request.id, outcome)

    def _outcome(self, request: Request, media: Sequence[bytes]) -> Outcome:
        outcome: Outcome
        try:
            preparer: Any = self._preparer()
            take = preparer.tokenize if runs_nothing(request) else preparer.prepare
            outcome = take(request, media)
        except RequestError as error:
            outcome = error
        except Exception as error:  # the request boundary: fails this request only
            log.exception("%s could not be prepared", request.id, extra=about(request.id))
            name = type(error).__name__
            outcome = RequestError(Code.INTERNAL_ERROR, f"The request could not be prepared ({name}).")
        return outcome

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
