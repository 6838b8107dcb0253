"""A small pool of threads for templates and tokenization, each with a tokenizer of its own.

A Hugging Face tokenizer used by two threads fails with "Already borrowed"; so none ever is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from protocol.errors import Code, RequestError
from protocol.messages import Generate
from worker.contract import Prepared, Preparer

log = logging.getLogger(__name__)

THREADS = 2

Outcome = Prepared | RequestError


class PreparerPool:
    """Prepares requests beside the I/O thread."""

    def __init__(self, open_preparer: Callable[[], Preparer]) -> None:
        self._own = threading.local()
        self._open = open_preparer
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def prepare(
        self, request: Generate, media: Sequence[bytes], done: Callable[[str, Outcome], None]
    ) -> None:
        """`done(id, outcome)` is called on a thread of the pool."""
        self._executor.submit(self._run, request, media, done)

    def _run(self, request: Generate, media: Sequence[bytes], done: Callable[[str, Outcome], None]) -> None:
        outcome: Outcome
        try:
            if not hasattr(self._own, "preparer"):
                self._own.preparer = self._open()
            outcome = self._own.preparer.prepare(request, media)
        except RequestError as error:
            outcome = error
        except Exception as error:  # the request boundary: its fault, its failure
            log.exception("%s could not be prepared", request.id)
            name = type(error).__name__
            outcome = RequestError(Code.INTERNAL_ERROR, f"The request could not be prepared ({name}).")
        done(request.id, outcome)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
