"""Log lines: one a person can read, or one JSON object, on stderr. No prompt text, unless it is asked for.

A line about a request names it twice: in its words, for people, and by `protocol.about`, for programs, which
find all that was said of one request by its `id`, in whichever process. What a client was told as
`x-request-id` is `request_id` in the lines of the gateway's HTTP.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

from protocol.about import fields_of

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


LINES_MAX = 20
PERIOD_S = 10.0
WORDINGS_MAX = 1024


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        request = f" [{id}]" if (id := fields_of(record).get("request_id")) else ""
        traceback = _traceback(self, record, chr(10))
        return f"{clock} {self._process:<8} {level}{record.getMessage()}{request}{traceback}"


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if traceback := _traceback(self, record, ""):
            line["traceback"] = traceback
        # ASCII, and not msgspec: a file name need not be Unicode, and must not cost us the line.
        return json.dumps(line)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord, lead: str) -> str:
    return lead + formatter.formatException(record.exc_info) if record.exc_info else ""


class Sparse(logging.Filter):
    """Lets one wording through `LINES_MAX` times within `PERIOD_S`; the next one after that says how many
    were left out. What peers and clients do wrong, they may do wrong ten thousand times a second.

    Lines below `level` pass, but for those of the loggers `named`, and of the ones below these. Two threads
    that log the same at once may be counted as one: no harm is done.
    """

    def __init__(
        self,
        level: int = logging.NOTSET,
        named: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._level, self._clock = level, clock
        self._families = tuple(f"{name}." for name in named)
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        """By logger and wording: since when, and how often."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < self._level and not f"{record.name}.".startswith(self._families):
            return True
        key, now = (record.name, str(record.msg)), self._clock()
        since, count = self._said.get(key, (now, 0))
        if now - since >= PERIOD_S:
            if count > LINES_MAX:
                record.msg = f"{record.msg} (and {count - LINES_MAX} more like it before)"
            since, count = now, 0
        if len(self._said) >= WORDINGS_MAX:
            self._said.clear()
        self._said[key] = since, count + 1
        return count < LINES_MAX


def setup(process: str, format: Format = "text", level: Level = "info", sparse: Sequence[str] = ()) -> None:
    """Send the log lines of this process to stderr in one format, repeated warnings sparsely. Called once, at
    the composition root.

    `sparse`: loggers, by name, of which other lines are sparse too, and those of the loggers below them.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Sparse(logging.WARNING, sparse))
    handler.setFormatter(_Json(process) if format == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "urllib3", "filelock", "huggingface_hub", "transformers", "uvicorn"):
        tame(name, logging.WARNING)


def tame(library: str, level: int) -> None:
    """Let a library speak only from `level` on, and in our format, whatever handlers it brought along."""
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(max(level, logging.getLogger().level))
