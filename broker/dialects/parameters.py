"""Parameters that OpenAI's dialects share: sampling, number of choices, stop sequences, caching."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from broker.dialects.body import NonEmptyStr, extra_schema, refuse, wrong
from broker.dialects.reasoning import ReasoningParameters, options
from protocol.messages import Generate
from protocol.types import Sampling, SparsePrefill, Token

CHOICES_MAX = 16
CACHE_SALT_CHARACTERS_MAX = 256
NO_LIMIT = -1
"""What clients of llama.cpp and LM Studio send as a maximum of tokens for none."""

PRIORITY_RANGE = (-(2**31), 2**31 - 1)

Priority = Annotated[int, Meta(ge=PRIORITY_RANGE[0], le=PRIORITY_RANGE[1])]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
CacheSalt = Annotated[str, Meta(max_length=CACHE_SALT_CHARACTERS_MAX)]
# Only the worker knows the model's vocabulary.
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024),
]
TokensOrNone = Annotated[int, Meta(ge=NO_LIMIT, le=2**31)]
MaxTokens = Annotated[TokensOrNone, extra_schema(**{"not": {"const": 0}})]
"""A maximum of tokens, or `NO_LIMIT` (see `check_max_tokens`)."""
TextOrTokens = NonEmptyStr | Annotated[list[Token], Meta(min_length=1)] | Token
"""In a list: a text, its token ids or, if the list is one text, one of its token ids."""
PromptText = str | list[int]


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
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    ignore_eos: bool | None = None
    n: Choices | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    priority: Priority | None = None
    speculation: bool | None = None
    sparse_prefill: bool | SparsePrefill | None = None
    min_tokens: int | None = None
    cache_salt: CacheSalt | None = None
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


def check(body: Parameters) -> None:
    """Check the fields that depend on others, or are not supported. Raises `RequestError` naming one."""
    if body.min_tokens:
        raise refuse("min_tokens", "is not supported: an answer ends where the model ends it")
    _check_cache_options(body)
    options(body)  # for its errors; made again at dispatch


def check_max_tokens(body: Struct, *names: str) -> None:
    """Raise `RequestError` for a maximum of no tokens."""
    for name in names:
        if getattr(body, name) == 0:
            raise wrong(name, f"must be at least 1, or {NO_LIMIT}")


def limit_texts(most: int) -> Meta:
    """Return the limits of a list of `TextOrTokens`: `most` texts, or any number of token ids."""
    lists = [{"maxItems": most, "items": {"type": kind}} for kind in ("string", "array")]
    one = {"items": {"type": "integer"}}
    return Meta(min_length=1, extra_json_schema={"anyOf": [*lists, one]})


def check_texts(param: str, given: str | list[Any]) -> None:
    """Raise `RequestError` if texts and token ids are mixed."""
    if isinstance(given, list) and len(set(map(type, given))) > 1:
        raise wrong(param, "must be text, token ids, or a list of either. The two cannot be mixed")


def is_one_text(given: str | list[Any]) -> bool:
    """Return whether a field has one text, not a list of texts."""
    return isinstance(given, str) or isinstance(given[0], int)


def texts_of(given: str | list[Any]) -> list[PromptText]:
    """Return the texts of a field."""
    return [given] if is_one_text(given) else cast("list[PromptText]", given)


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


def sparse_of(wish: bool | SparsePrefill | None) -> SparsePrefill | None:
    """Return the sparse-prefill parameters; None: the worker's default."""
    if wish is None or isinstance(wish, SparsePrefill):
        return wish
    return SparsePrefill() if wish else SparsePrefill(keep=1.0)


def stop_strings(body: Parameters) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or [])


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
