"""Structured fields of log records, such as the id of the request."""

from __future__ import annotations

import logging


def about(id: str = "", **fields: object) -> dict[str, object]:
    """Return the `extra` argument of a log call. `id`: the request's id; empty if there is none."""
    return {"fields": {"id": id, **fields} if id else fields}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    found = getattr(record, "fields", None)
    return found if isinstance(found, dict) else {}
