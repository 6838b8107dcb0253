"""Cancellation token of a request that is being prepared. Part of the worker's lowest layer."""

from __future__ import annotations


class PreparationCancelled(Exception):
    """The request was cancelled while it was being prepared; it has no outcome."""


class CancelToken:
    """Cancellation token of one preparation. The I/O thread cancels it, the preparer's thread checks it
    between two pieces of work."""

    __slots__ = ("_is_cancelled",)

    def __init__(self) -> None:
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def check(self) -> None:
        """Raise `PreparationCancelled` if the request was cancelled."""
        if self._is_cancelled:
            raise PreparationCancelled


NEVER = CancelToken()
"""The token of a preparation that nothing cancels."""
