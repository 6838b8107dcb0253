"""What somebody who has started `serve` wants to know first: that it serves, and how to try it.

A thread asks the gateway until some model is ready, says so once, and ends. It only looks on: whether it
hears anything has no bearing on what is served.
"""

from __future__ import annotations

import logging
import threading
import urllib.request
from types import TracebackType

log = logging.getLogger(__name__)

LOOK_S = 0.5
ANSWER_S_MAX = 2.0


class Greeting:
    """While its context is open."""

    def __init__(self, url: str, needs_key: bool) -> None:
        self._url = url
        self._needs_key = needs_key
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="greeting", daemon=True)

    def __enter__(self) -> Greeting:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(ANSWER_S_MAX)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            if is_ready(self._url):
                log.info("%s", words(self._url, self._needs_key))
                return


def is_ready(url: str) -> bool:
    """Whether some model can be asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/ready", timeout=ANSWER_S_MAX) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def words(url: str, needs_key: bool) -> str:
    """What can be pasted into another terminal."""
    key = ' -H "authorization: Bearer YOUR-KEY"' if needs_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    path, kind = f"{url}/v1/chat/completions", "-H 'content-type: application/json'"
    return f"serving; try: curl {path} {kind}{key} -d '{body}'"
