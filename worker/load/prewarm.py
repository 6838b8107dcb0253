"""Prewarm a spare worker: trigger what libraries defer until first use, besides importing them."""

from __future__ import annotations

import logging

import mlx.core as mx
from mlx_vlm.utils import get_model_and_args

from protocol.common.model_folder import POCKET
from worker.input.media.processor import load_processor
from worker.input.prompts.prompt import open_tokenizer
from worker.load.config import read_config
from worker.pocket import MODEL_PATH

log = logging.getLogger(__name__)


def look_ahead() -> None:
    """Open the embedded model's tokenizer and processor, which import many modules, and initialize the
    device. The results are discarded."""
    open_tokenizer(MODEL_PATH, ())
    get_model_and_args(
        {"model_type": read_config(MODEL_PATH, POCKET).architecture}
    )  # registers the processor
    load_processor(MODEL_PATH)
    log.debug("%s", mx.default_device())
