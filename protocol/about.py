"""What a log line says beside its words, for programs: the id of the request that it is about, and more."""

from __future__ import annotations

import logging


def about(id: str = "", **fields: object) -> dict[str, object]:
    """Give it as `extra`. `id`: of the request; empty: it is about none in particular."""
    return {"fields": {"id": id, **fields} if id else fields}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    found = getattr(record, "fields", None)
    return found if isinstance(found, dict) else {}
