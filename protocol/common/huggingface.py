"""Timeouts and exceptions of `huggingface_hub`.

It queries a model's metadata without a timeout, even for a fully downloaded model, so nothing would start on
a network that drops packets. Its HTTP library's exceptions are no `OSError`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from protocol.common.environment import network_variables

_WAITS = ("connect", "read", "write", "pool")


def bound() -> None:
    """Give all requests a timeout of `HF_HUB_ETAG_TIMEOUT` (10 s) per read, write or connect.

    Raises `EnvironmentFault` if no request is possible because of a variable.
    """
    from huggingface_hub import get_session

    with network_variables(os.environ, _library().InvalidURL):
        hooks = get_session().event_hooks["request"]
    if _limit not in hooks:
        hooks.append(_limit)


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions for a server that does not respond, from whichever HTTP library is in use."""
    return (_library().TransportError,)


def _library() -> Any:
    from huggingface_hub.errors import HfHubHTTPError

    [base] = [each for each in HfHubHTTPError.__mro__ if each.__name__ == "HTTPError"]
    return sys.modules[base.__module__.partition(".")[0]]


def _limit(request: Any) -> None:
    from huggingface_hub import constants

    waits, wait_s_max = request.extensions.get("timeout", {}), constants.HF_HUB_ETAG_TIMEOUT
    request.extensions["timeout"] = {kind: waits.get(kind) or wait_s_max for kind in _WAITS}
