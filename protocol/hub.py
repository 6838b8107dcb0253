"""Hugging Face, for those who ask it: how long it may be silent, and what its library raises.

`huggingface_hub` waits for ever for an answer where it asks what a model is, also about one that is here in
whole: behind a network that swallows packets nothing would start. What its HTTP library raises is no
`OSError`.
"""

from __future__ import annotations

import sys
from typing import Any

_WAITS = ("connect", "read", "write", "pool")


def bound() -> None:
    """From now on no request waits longer for a sign of life than `HF_HUB_ETAG_TIMEOUT` says: 10 s."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["request"]
    if _limit not in hooks:
        hooks.append(_limit)


def transport_errors() -> tuple[type[Exception], ...]:
    """What is raised when nobody answers: of whichever library it is that speaks HTTP there."""
    from huggingface_hub import get_session

    library = sys.modules[type(get_session()).__module__.partition(".")[0]]
    return (library.TransportError,)


def _limit(request: Any) -> None:
    from huggingface_hub import constants

    waits, wait_s_max = request.extensions.get("timeout", {}), constants.HF_HUB_ETAG_TIMEOUT
    request.extensions["timeout"] = {kind: waits.get(kind) or wait_s_max for kind in _WAITS}
