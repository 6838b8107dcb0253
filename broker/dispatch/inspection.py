"""Request inspection: the latest requests as received, for debugging. Pure.

Enabled by `--inspect`. Requests are kept in memory only, bounded in number and bytes; their flights show the
output so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from broker.dispatch.flight import Flight
from protocol.messages import Generate
from protocol.tasks import runs_nothing

KEPT_MAX = 32
KEPT_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """The request of one choice. `body`: as the client sent it to `path`."""

    path: str
    body: bytes
    flight: Flight
    request: Generate

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(map(len, self.flight.media))


class Inspection:
    """Captured requests, oldest first."""

    def __init__(self) -> None:
        self.kept: deque[CapturedRequest] = deque(maxlen=KEPT_MAX)

    @contextmanager
    def keeping(
        self, path: str, body: bytes, submission: AbstractContextManager[Sequence[Flight]]
    ) -> Iterator[Sequence[Flight]]:
        """Enter `submission` and capture those of its flights that generate text."""
        with submission as flights:
            for flight in flights:
                request = flight.request
                # Without an answer a request asks only for logprobs, as the inspection page itself does.
                if isinstance(request, Generate) and not runs_nothing(request) and request.max_tokens != 0:
                    self._keep(CapturedRequest(path, body, flight, request))
            yield flights

    def find(self, id: str) -> CapturedRequest | None:
        return next((kept for kept in self.kept if kept.flight.id == id), None)

    def _keep(self, kept: CapturedRequest) -> None:
        self.kept.append(kept)
        while len(self.kept) > 1 and sum(each.nbytes for each in self.kept) > KEPT_BYTES_MAX:
            self.kept.popleft()
