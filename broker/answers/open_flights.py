"""The open flights of one answer, with the context that closes them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from broker.dispatch.flight import Batch, Flight
from protocol.errors import KINDS, code_named
from protocol.messages import Failed

Headers = Sequence[tuple[bytes, bytes]]
OpeningHeaders = Callable[[Sequence[Flight]], tuple[Headers, bool]]
"""Returns the headers of the response, and whether everything is known that they can say."""


class OpenFlights:
    """Flights of one request, one for each choice. The constructor opens them."""

    def __init__(
        self,
        context: AbstractContextManager[Sequence[Flight]],
        *,
        on_end: Callable[[Flight, int], None],
        opening: OpeningHeaders = lambda flights: ((), True),
        choices: Sequence[int] | None = None,
    ) -> None:
        """Enter the context of the flights. Raises `RequestError`.

        `on_end`: logs a flight, with a status. `choices`: the number of each flight's choice; None: all in
        order.
        """
        self._opening = opening
        self._on_end = on_end
        self._stack = ExitStack()
        self._flights = self._stack.enter_context(context)
        numbers = range(len(self._flights)) if choices is None else choices
        self.numbered = list(zip(numbers, self._flights, strict=True))
        """Each flight with the number of its choice."""

    @property
    def are_waiting(self) -> bool:
        """Whether none is at a worker."""
        return all(flight.attempt is None for flight in self._flights)

    def headers(self) -> tuple[Headers, bool]:
        """Return the headers of the response as far as they are known, and whether that is everything."""
        return self._opening(self._flights)

    def take(self) -> list[Batch]:
        """Return all output that has arrived."""
        return [(choice, flight.take()) for choice, flight in self.numbered if flight.pending]

    def set_unread_since(self, since: float | None) -> None:
        """Set since when their client has to read before more can be sent; None: it need not."""
        for flight in self._flights:
            flight.unread_since = since

    def close(self, status: int | None) -> None:
        """Close the flights, and log them with a status; None: each with its own."""
        for flight in self._flights:
            self._on_end(flight, _status_of(flight) if status is None else status)
        self._stack.close()


def _status_of(flight: Flight) -> int:
    """Return the status of a flight whose clients may all have left."""
    end = flight.terminal
    if end is None:
        return 499
    return KINDS[code_named(end.code)].status if isinstance(end, Failed) else 200
