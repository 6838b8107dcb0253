"""Engine failures: ends the process after too many consecutive ones.

The failure of a prompt counts only if the engine then fails on a probe prompt as well, so no client can end
the worker with its prompts. A failure of the GPU ends the process at once.
"""

from __future__ import annotations

import logging

from protocol.errors import Code, RequestError
from worker.interfaces import Engine
from worker.process.device_errors import raise_if_device_failed
from worker.values import GuideError, SamplingParams

log = logging.getLogger(__name__)

FAILURES_MAX = 10
PROBE = "probe"
"""Row id of the probe prompt. A gateway's request ids are random, and never this one."""
_PROBE_TOKENS = (0, 0)


class EngineKeepsFailing(Exception):
    """The engine failed too many times in a row; the process must be restarted."""


class Failures:
    """Counter of consecutive failures, without a token in between."""

    def __init__(self) -> None:
        self._count = 0

    def clear(self) -> None:
        """Reset the count: the engine has produced a token."""
        self._count = 0

    def count(self, error: Exception) -> None:
        """Count a failure of the engine. Raises `EngineKeepsFailing`, or `DeviceError` if the GPU failed."""
        raise_if_device_failed(error)
        self._count += 1
        if self._count >= FAILURES_MAX:
            raise EngineKeepsFailing(f"{self._count} failures in a row, the last {error!r}")

    def probe(self, engine: Engine) -> None:
        """Count a failed prompt if a probe prompt fails as well. Raises `EngineKeepsFailing`."""
        try:
            engine.prefill({PROBE: _PROBE_TOKENS[:-1]})
            engine.start(PROBE, _PROBE_TOKENS, len(_PROBE_TOKENS), SamplingParams())
        except Exception as failure:  # the engine is at fault
            log.exception("the engine fails on a probe prompt as well")
            self.count(failure)
        finally:
            engine.drop(PROBE)


def engine_error(error: Exception) -> RequestError:
    """Return the error for a request on which the model failed, or whose grammar cannot be enforced to its
    end. Raises `DeviceError` if the GPU failed."""
    raise_if_device_failed(error)
    if isinstance(error, GuideError):
        message = f"The grammar of this request cannot be enforced to the end of its answer: {error}."
        return RequestError(Code.INVALID_REQUEST, message)
    wording = f"The model failed on this request ({type(error).__name__})."
    return RequestError(Code.ENGINE_ERROR, wording)
