"""Downloads of models that clients order; the supervisor carries them out. Pure.

The desired downloads are sent as a whole, and their states reported as a whole. Those of a previous gateway
are adopted. A finished one is remembered until `REMEMBERED_MAX` newer ones are ordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from protocol.errors import Code, RequestError
from protocol.supervisor_messages import PULLS_MAX, Pull, PullState

REMEMBERED_MAX = 16
MODEL_CHARACTERS_MAX = 200
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Pulls:
    """Desired and observed downloads, by the id of the order. `wanted`: None until there was an order."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        self.wanted: list[Pull] | None = None
        self._make_id = make_id
        self._states: dict[str, PullState] = {}
        self._is_possible = False

    def on_states(self, states: Sequence[PullState] | None) -> None:
        """Apply the reported states; those that have ended are not wanted any more."""
        self._is_possible = states is not None
        if self.wanted is None:
            self.wanted = [Pull(id=state.id, model=state.model) for state in states or ()] or None
        for state in states or ():
            if self._is_wanted(
                state.id
            ):  # otherwise it was cancelled, or has finished, and is still reported
                self._states[state.id] = state
        self.wanted = self.wanted and [pull for pull in self.wanted if self._runs(pull.id)]

    def order(self, model: str) -> PullState:
        """Order a download; return the running one if there is one. Raises `RequestError`."""
        if len(model) > MODEL_CHARACTERS_MAX or not _MODEL.fullmatch(model):
            message = f"'model' must be a model of the hub, as OWNER/NAME; it is {model[:64]!r}."
            raise RequestError(Code.INVALID_REQUEST, message, param="model")
        if not self._is_possible:
            message = (
                "Models are downloaded only by `roundhouse serve`: run `roundhouse pull` on the machine."
            )
            raise RequestError(Code.INVALID_REQUEST, message, param="model")
        wanted = self.wanted or []
        for pull in wanted:
            if pull.model == model:
                return self._states[pull.id]
        if len(wanted) >= PULLS_MAX:
            message = f"{PULLS_MAX} models are being downloaded already."
            raise RequestError(Code.TOO_MANY_CONNECTIONS, message, retry_after_s=30.0)
        new = Pull(id=self._make_id(), model=model)
        self.wanted = [*wanted, new]
        self._states[new.id] = PullState(id=new.id, model=model)
        while len(self._states) > REMEMBERED_MAX:
            del self._states[next(id for id in self._states if not self._is_wanted(id))]
        return self._states[new.id]

    def cancel(self, id: str) -> PullState:
        """Cancel a download; return its last state. What has arrived stays, and is continued by the next
        order. Raises `RequestError` if it is not known."""
        state = self.state(id)
        if self._is_wanted(id):
            self.wanted = [pull for pull in self.wanted or () if pull.id != id]
            cancelled = PullState(
                id=id,
                model=state.model,
                stage="failed",
                done_bytes=state.done_bytes,
                total_bytes=state.total_bytes,
                failure="It was cancelled.",
            )
            self._states[id] = cancelled
        return self._states[id]

    def state(self, id: str) -> PullState:
        """Return a download. Raises `RequestError` if it is not known."""
        if (state := self._states.get(id)) is None:
            raise RequestError(Code.ROUTE_NOT_FOUND, f"No download `{id[:64]}` is known.", param="id")
        return state

    def states(self) -> list[PullState]:
        """Return all known downloads, the oldest first."""
        return list(self._states.values())

    def _is_wanted(self, id: str) -> bool:
        return any(pull.id == id for pull in self.wanted or ())

    def _runs(self, id: str) -> bool:
        return self._states[id].stage == "running"
