"""What a worker that waits does beforehand, besides importing: what libraries put off until it is needed."""

from __future__ import annotations

import logging

import mlx.core as mx
from mlx_vlm.utils import get_model_and_args

from protocol.naming import POCKET
from worker.models.config import read_config
from worker.models.processor import load_processor
from worker.models.prompt import open_tokenizer
from worker.pocket import MODEL_PATH

log = logging.getLogger(__name__)


def look_ahead() -> None:
    """Open the embedded model's tokenizer and its processor, for which libraries import a good deal, and look
    at the device. Nothing is kept."""
    open_tokenizer(MODEL_PATH, ())
    get_model_and_args({"model_type": read_config(MODEL_PATH, POCKET).architecture})  # whose processor it is
    load_processor(MODEL_PATH)
    log.debug("%s", mx.default_device())
