"""Log lines: one a person can read, or one JSON object, on stderr. Never prompt text."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{clock} {self._process:<8} {level}{record.getMessage()}{_traceback(self, record, chr(10))}"


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
        if traceback := _traceback(self, record, ""):
            line["traceback"] = traceback
        # ASCII, and not msgspec: a file name need not be Unicode, and must not cost us the line.
        return json.dumps(line)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord, lead: str) -> str:
    return lead + formatter.formatException(record.exc_info) if record.exc_info else ""


def setup(process: str, format: Format = "text", level: Level = "info") -> None:
    """Send every log line of this process to stderr in one format. Called once, at the composition root."""
    handler = logging.StreamHandler(sys.stderr)
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
