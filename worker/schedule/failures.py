"""Failures of the engine: when it has failed too often in a row for this process to go on.

The failure of a prompt counts only if the engine then fails on a harmless one as well: no client can end the
worker with prompts of its own.
"""

from __future__ import annotations

import logging

from protocol.errors import Code, RequestError
from worker.contract import Draw, Engine

log = logging.getLogger(__name__)

FAILURES_MAX = 10
PROBE = "probe"
"""The row of the harmless prompt. A gateway draws its requests' ids, and never this one."""
_PROBE_TOKENS = (0, 0)


class EngineKeepsFailing(Exception):
    """The engine failed too many times in a row; a fresh process is the cure."""


class Failures:
    """Counts failures without a token in between."""

    def __init__(self) -> None:
        self._count = 0

    def clear(self) -> None:
        """The engine has made a token."""
        self._count = 0

    def count(self, error: Exception) -> None:
        """The engine's own failure. Raises `EngineKeepsFailing`."""
        self._count += 1
        if self._count >= FAILURES_MAX:
            raise EngineKeepsFailing(f"{self._count} failures in a row, the last {error!r}")

    def probe(self, engine: Engine) -> None:
        """A prompt has failed: was it the engine? Raises `EngineKeepsFailing`."""
        try:
            engine.prefill({PROBE: _PROBE_TOKENS[:-1]})
            engine.start(PROBE, _PROBE_TOKENS, len(_PROBE_TOKENS), Draw())
        except Exception as failure:  # the engine's
            log.exception("the engine fails on a harmless prompt as well")
            self.count(failure)
        finally:
            engine.drop(PROBE)


def engine_error(error: Exception) -> RequestError:
    """What a request is told that the model failed on."""
    wording = f"The model failed on this request ({type(error).__name__})."
    return RequestError(Code.ENGINE_ERROR, wording)
