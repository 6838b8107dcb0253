"""Sampling params: the request's values, with defaults from the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol.errors import Code, RequestError
from protocol.types import Sampling
from worker.values import Grammar, SamplingParams, ThinkingBudget


class _GenerationConfig(msgspec.Struct):
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_defaults(folder: Path) -> SamplingParams:
    """Read the model's default sampling params. Raises `ValueError` for an invalid generation_config.json."""
    file = folder / "generation_config.json"
    config = (
        msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
        if file.is_file()
        else _GenerationConfig()
    )
    penalty = config.repetition_penalty or 1.0
    if config.do_sample is False:
        return SamplingParams(repetition_penalty=penalty)
    return SamplingParams(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
    )


def draw_of(
    sampling: Sampling,
    defaults: SamplingParams,
    vocabulary: int,
    thoughts: ThinkingBudget | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Merge a request's sampling params with the defaults. Raises `RequestError` for a bias of a token beyond
    `vocabulary`, the number of tokens."""
    top_k = defaults.top_k if sampling.top_k is None else sampling.top_k
    penalty = sampling.repetition_penalty
    return SamplingParams(
        seed=sampling.seed,
        temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
        top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
        top_k=top_k if 0 < top_k < vocabulary else 0,
        min_p=defaults.min_p if sampling.min_p is None else sampling.min_p,
        repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_logit_bias(sampling.logit_bias, vocabulary - 1),
        logprobs=sampling.logprobs,
        thinking_budget=thoughts,
        grammar=grammar,
    )


def _logit_bias(biases: Mapping[int, float], last: int) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not 0 <= token <= last:
            raise RequestError(
                Code.INVALID_REQUEST,
                f"logit_bias names token {token}, but this model's tokens are 0 to {last}.",
                param="logit_bias",
            )
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias))
