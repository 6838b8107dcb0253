"""A small pool of threads for templates and tokenization, each with a tokenizer of its own.

A Hugging Face tokenizer used by two threads fails with "Already borrowed"; so none ever is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from protocol.about import about
from protocol.errors import Code, RequestError
from protocol.messages import Request
from protocol.tasks import runs_nothing
from worker.contract import Prepared, Preparer, Tokenized
from worker.texts import PreparedTexts, TextsPreparer

log = logging.getLogger(__name__)

THREADS = 2
WARM_S_MAX = 10.0

Outcome = Prepared | PreparedTexts | Tokenized | RequestError
_AnyPreparer = Preparer | TextsPreparer


class PreparerPool:
    """Prepares requests beside the I/O thread."""

    def __init__(self, open_preparer: Callable[[], _AnyPreparer]) -> None:
        """Whoever asks for what these do not prepare has been turned away before."""
        self._own = threading.local()
        self._open = open_preparer
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def warm(self) -> None:
        """Open every thread's preparer now, or the first requests would wait for it. What fails here is tried
        again, and told, with a request."""
        together = threading.Barrier(THREADS)  # or one thread would take both
        futures = [self._executor.submit(self._warm, together) for _ in range(THREADS)]
        wait(futures, timeout=WARM_S_MAX)

    def _warm(self, together: threading.Barrier) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(WARM_S_MAX)
        try:
            self._preparer()
        except Exception:  # the request boundary: whoever asks first is told
            log.debug("a preparer cannot be opened", exc_info=True)

    def _preparer(self) -> _AnyPreparer:
        if not hasattr(self._own, "preparer"):
            self._own.preparer = self._open()
        preparer: _AnyPreparer = self._own.preparer
        return preparer

    def prepare(self, request: Request, media: Sequence[bytes], done: Callable[[str, Outcome], None]) -> None:
        """`done(id, outcome)` is called on a thread of the pool."""
        self._executor.submit(self._run, request, media, done)

    def _run(self, request: Request, media: Sequence[bytes], done: Callable[[str, Outcome], None]) -> None:
        outcome: Outcome
        try:
            preparer: Any = self._preparer()
            take = preparer.tokenize if runs_nothing(request) else preparer.prepare
            outcome = take(request, media)
        except RequestError as error:
            outcome = error
        except Exception as error:  # the request boundary: its fault, its failure
            log.exception("%s could not be prepared", request.id, extra=about(request.id))
            name = type(error).__name__
            outcome = RequestError(Code.INTERNAL_ERROR, f"The request could not be prepared ({name}).")
        done(request.id, outcome)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
