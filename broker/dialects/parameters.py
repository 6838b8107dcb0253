"""Parameters that OpenAI's dialects share: sampling, number of choices, stop sequences, caching."""

from __future__ import annotations

import hashlib
import re
import secrets

import msgspec
from msgspec import Struct

from broker.dialects.body import check_range, refuse
from broker.dialects.reasoning import ReasoningParameters, options
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import Sampling, SparsePrefill

CHOICES_MAX = 16
TOP_LOGPROBS_MAX = 20
LOGIT_BIASES_MAX = 1024
STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 1024
CACHE_SALT_CHARACTERS_MAX = 256

MAX_TOKENS_MAX = 2**31
NO_LIMIT = -1
"""What clients of llama.cpp and LM Studio send as a maximum of tokens for none."""
_TOKEN_ID = re.compile(r"[0-9]{1,9}")

PRIORITY_RANGE = (-(2**31), 2**31 - 1)

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "n": (1, CHOICES_MAX),
    "priority": PRIORITY_RANGE,
}


class StreamOptions(Struct):
    include_usage: bool | None = None


class PromptCacheOptions(Struct):
    """Options of the prefix cache. `isolated`, an extension: only requests with the same `prompt_cache_key`
    share prefixes. OpenAI's `mode`, `ttl` and `comparison_response_id` have no effect."""

    prewarm: bool | None = None
    isolated: bool | None = None


class Parameters(ReasoningParameters, kw_only=True):
    """Shared body fields. Unknown fields are ignored and null means absent, as clients expect.

    `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and `priority` (smaller is served first) are
    extensions, named as in vLLM. So are `cache_salt` (only requests with the same salt share prefixes) and
    `cache_pin` (prefixes of this request are evicted last). A false `speculation` disables drafts, which
    changes only the speed. With `sparse_prefill` a long prompt is only partly prefilled, which may
    change the answer. `adapter` names one of the model's adapters.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    speculation: bool | None = None
    sparse_prefill: bool | SparsePrefill | None = None
    min_tokens: int | None = None
    cache_salt: str | None = None
    cache_pin: bool | None = None
    adapter: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def salt(self) -> str:
        """The salt of the prefix cache."""
        options = self.prompt_cache_options
        own = f"prompt_cache_key={self.prompt_cache_key};" if options and options.isolated else ""
        return own + (self.cache_salt or "")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check(body: Parameters, *, max_tokens_min: int = 1) -> None:
    """Check values. Raises `RequestError` naming the parameter. `max_tokens_min`: minimum of `max_tokens`."""
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(body, name), low, high)
    check_max_tokens("max_tokens", body.max_tokens, max_tokens_min)
    _check_logit_bias(body.logit_bias or {})
    _check_stop(stop_strings(body))
    if body.min_tokens:
        raise refuse("min_tokens", "is not supported: an answer ends where the model ends it")
    if len(body.cache_salt or "") > CACHE_SALT_CHARACTERS_MAX:
        message = f"'cache_salt' can have at most {CACHE_SALT_CHARACTERS_MAX} characters."
        raise RequestError(Code.INVALID_REQUEST, message, param="cache_salt")
    _check_cache_options(body)
    options(body)  # for its errors; made again at dispatch


def check_max_tokens(name: str, value: int | None, low: int = 1) -> None:
    """Check a maximum of tokens: `NO_LIMIT`, or at least `low`. Raises `RequestError`."""
    if value != NO_LIMIT:
        check_range(name, value, low, MAX_TOKENS_MAX)


def token_limit(value: int | None) -> int | None:
    """Return a maximum of tokens for the worker; None: as many as fit."""
    return None if value == NO_LIMIT else value


def _check_cache_options(body: Parameters) -> None:
    if (options := body.prompt_cache_options) is None:
        return
    if options.prewarm:
        raise refuse("prompt_cache_options.prewarm", "is not supported: send 'max_tokens': 1 instead")
    if options.isolated and not 1 <= len(body.prompt_cache_key or "") <= CACHE_SALT_CHARACTERS_MAX:
        why = f"must have 1 to {CACHE_SALT_CHARACTERS_MAX} characters to isolate prefixes"
        raise refuse("prompt_cache_key", why)


def _check_logit_bias(biases: dict[str, float]) -> None:
    if len(biases) > LOGIT_BIASES_MAX:
        message = f"'logit_bias' can hold at most {LOGIT_BIASES_MAX} tokens."
        raise RequestError(Code.INVALID_REQUEST, message, param="logit_bias")
    for token, bias in biases.items():
        # Only the worker knows the model's vocabulary.
        if not _TOKEN_ID.fullmatch(token):
            message = f"'logit_bias' must map token ids to numbers; {token[:32]!r} is not a token id."
            raise RequestError(Code.INVALID_REQUEST, message, param="logit_bias")
        check_range("logit_bias", bias, -100, 100)


def sparse_of(wish: bool | SparsePrefill | None) -> SparsePrefill | None:
    """Return the sparse-prefill parameters; None: the worker's default."""
    if wish is None or isinstance(wish, SparsePrefill):
        return wish
    return SparsePrefill() if wish else SparsePrefill(keep=1.0)


def stop_strings(body: Parameters) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or [])


def _check_stop(strings: list[str]) -> None:
    if len(strings) > STOP_STRINGS_MAX:
        raise RequestError(
            Code.INVALID_REQUEST, f"'stop' can hold at most {STOP_STRINGS_MAX} strings.", param="stop"
        )
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= STOP_STRING_CHARACTERS_MAX:
            limit = f"1 to {STOP_STRING_CHARACTERS_MAX} characters"
            raise RequestError(
                Code.INVALID_REQUEST, f"'stop[{index}]' must have {limit}.", param=f"stop[{index}]"
            )


# --- to the worker -----------------------------------------------------------------------------------


def seed_of(seed: int | None) -> int:
    """Return the seed, or a random one for none or a negative one, so that the request can be resent."""
    return secrets.randbits(63) if seed is None or seed < 0 else seed


def sampling(body: Parameters, logprobs: int | None) -> Sampling:
    """Return the sampling parameters."""
    return Sampling(
        seed=seed_of(body.seed),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        logprobs=logprobs,
    )


def copies(request: Generate, count: int) -> list[Generate]:
    """Return one request per choice, differing in id and seed; the first is `request` itself."""
    further = [
        msgspec.structs.replace(
            request,
            id=f"{request.id}-{choice}",
            sampling=msgspec.structs.replace(
                request.sampling, seed=derived_seed(request.sampling.seed, choice)
            ),
        )
        for choice in range(1, count)
    ]
    return [request, *further]


def derived_seed(seed: int, choice: int) -> int:
    """Return the seed of a further choice: the first 63 bits of SHA-256 over `seed/choice` in decimal.

    With a sum, the second choice of one seed would equal the first choice of the next seed.
    """
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
