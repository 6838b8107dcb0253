"""What a worker that waits does beforehand, besides importing: what libraries put off until it is needed."""

from __future__ import annotations

import logging

import mlx.core as mx

from worker.models.prompt import open_tokenizer
from worker.pocket import MODEL_PATH

log = logging.getLogger(__name__)


def look_ahead() -> None:
    """Open a tokenizer, for which transformers imports a good deal, and look at the device; keep nothing."""
    open_tokenizer(MODEL_PATH, ())
    log.debug("%s", mx.default_device())
