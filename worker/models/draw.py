"""How a request's tokens are drawn: what it asks for, and what the model's makers have set for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol.errors import Code, RequestError
from protocol.parts import Sampling
from worker.contract import Draw, ThoughtLimit
from worker.guides import Grammar


class _GenerationConfig(msgspec.Struct):
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_defaults(folder: Path) -> Draw:
    """How the model's makers sample it. Raises `ValueError` for a generation_config.json that is none."""
    file = folder / "generation_config.json"
    config = (
        msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
        if file.is_file()
        else _GenerationConfig()
    )
    penalty = config.repetition_penalty or 1.0
    if config.do_sample is False:
        return Draw(repetition_penalty=penalty)
    return Draw(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
    )


def draw_of(
    sampling: Sampling,
    defaults: Draw,
    vocabulary: int,
    thoughts: ThoughtLimit | None,
    grammar: Grammar | None = None,
) -> Draw:
    """Of a model with so many tokens. Raises `RequestError` for a bias of a token that it does not have."""
    top_k = defaults.top_k if sampling.top_k is None else sampling.top_k
    penalty = sampling.repetition_penalty
    return Draw(
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
        thoughts=thoughts,
        grammar=grammar,
    )


def _logit_bias(biases: Mapping[int, float], last: int) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not 0 <= token <= last:
            raise RequestError(
                Code.INVALID_REQUEST,
                f"logit_bias names token {token}, and this model's tokens are 0 to {last}.",
                param="logit_bias",
            )
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias))
