"""OpenAI's older completions, text that goes on: body -> Generate, and how a choice looks in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from broker.dialects.body import check_range, decode, encode, encode_text, refuse
from broker.dialects.logprobs import LegacyLogprobs
from broker.dialects.parameters import CHOICES_MAX, Parameters, check, copies, sampling, stop_strings
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.parts import Delta

MAX_TOKENS_DEFAULT = 16
LOGPROBS_MAX = 5


class Body(Parameters, kw_only=True):
    """What is read of the body, beside what the dialects share."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def choices(self) -> int:
        """How many answers there will be: `n` to each prompt."""
        return len(self.prompts) * (self.n or 1)


_body_decoder = msgspec.json.Decoder(Body)


def read(raw: bytes) -> Body:
    """Bytes -> a checked body. Raises `RequestError` naming the parameter at fault."""
    body = decode(_body_decoder, raw)
    if body.echo:
        raise refuse("echo", "is not served: the answer holds what follows the prompt")
    if body.suffix:
        raise refuse("suffix", "is not served: text goes on at the end of the prompt only")
    check(body)
    check_range("logprobs", body.logprobs, 0, LOGPROBS_MAX)
    if body.best_of not in (None, 1, body.n or 1):
        raise refuse("best_of", "can only be what 'n' is: no more are tried than are returned")
    _check_prompts(body)
    return body


def _check_prompts(body: Body) -> None:
    if not all(isinstance(prompt, str) for prompt in body.prompts):
        raise refuse("prompt", "must be text, or a list of texts: token ids are not served")
    if not body.prompts or not all(body.prompts):
        raise RequestError(Code.INVALID_REQUEST, "'prompt' must not be empty.", param="prompt")
    if body.choices > CHOICES_MAX:
        message = f"'prompt' and 'n' ask for {body.choices} answers, and at most {CHOICES_MAX} can be had."
        raise RequestError(Code.INVALID_REQUEST, message, param="prompt")


# --- to the worker -----------------------------------------------------------------------------------


def generate(body: Body, *, id: str, incarnation: str) -> list[Generate]:
    """The messages to the worker, in the order of the choices: all those of a prompt, then the next one's.

    Every prompt begins with the same seed, so its answers are those it would have had alone.
    """
    drawn = sampling(body, body.logprobs)
    requests: list[Generate] = []
    for place, prompt in enumerate(body.prompts):
        first = Generate(
            incarnation=incarnation,
            id=f"{id}.{place}" if place else id,
            sampling=drawn,
            prompt=prompt,
            stop=stop_strings(body),
            max_tokens=MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens,
            ignore_eos=bool(body.ignore_eos),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            cache_pin=bool(body.cache_pin),
        )
        requests += copies(first, body.n or 1)
    return requests


# --- to the client -----------------------------------------------------------------------------------


class Form:
    """`answer.Form` of completions."""

    def __init__(self, *, logprobs: bool, choices: int) -> None:
        """`logprobs`: whether they were asked for."""
        self._logprobs = [LegacyLogprobs() if logprobs else None for _ in range(choices)]

    def opening(self, choice: int) -> bytes:
        return b""

    def gain(self, choice: int, delta: Delta) -> bytes:
        logprobs = self._logprobs[choice]
        if logprobs is not None and delta.likelihoods:
            return encode(_choice(choice, delta.text, logprobs=logprobs.take(delta.likelihoods)))
        if not delta.text:
            return b""
        # By hand, since most events are of this kind.
        text = encode_text(delta.text)
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice, text)

    def closing(self, choice: int, reason: str) -> bytes:
        return encode(_choice(choice, "", reason=reason))

    def whole(self, choice: int, deltas: Sequence[Delta], reason: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        logprobs = self._logprobs[choice]
        likelihoods = [of for delta in deltas for of in delta.likelihoods]
        taken = None if logprobs is None else logprobs.take(likelihoods)
        return _choice(choice, text, logprobs=taken, reason=reason)


def _choice(
    choice: int, text: str, *, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
