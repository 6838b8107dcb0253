"""Log-probabilities as OpenAI's dialects show them: chat's list of entries, and the older four lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from protocol.parts import Likelihood, PromptToken

LOGPROB_MIN = -9999.0
"""What stands for minus infinity, which JSON cannot carry."""


def chat_logprobs(likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat, whole or in a chunk."""
    return {"content": entries(likelihoods), "refusal": None}


def entries(likelihoods: Sequence[Likelihood]) -> list[dict[str, Any]]:
    """One for each token, as chat and responses show them."""
    return [
        _entry(of.bytes, of.logprob) | {"top_logprobs": [_entry(*one) for one in of.top]}
        for of in likelihoods
    ]


def _entry(spelled: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _show(spelled), "logprob": _finite(logprob), "bytes": list(spelled)}


class LegacyLogprobs:
    """`choices[].logprobs` of a completion, which counts characters as it goes: one for each choice."""

    def __init__(self, offset: int = 0) -> None:
        """`offset`: of the first token, in characters."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def take(self, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
        """The four lists of the next tokens. The offset of a token is that of the character it begins or
        goes on with."""
        offsets = []
        for of in likelihoods:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(of.bytes))
        return legacy_lists(likelihoods, offsets)


def legacy_lists(likelihoods: Sequence[Likelihood | PromptToken], offsets: list[int]) -> dict[str, Any]:
    """The four lists of tokens. Each is among its own `top_logprobs`, as an addition if need be; of the first
    of a prompt there are none."""
    return {
        "tokens": [_show(of.bytes) for of in likelihoods],
        "token_logprobs": [None if of.logprob is None else _finite(of.logprob) for of in likelihoods],
        "top_logprobs": [None if of.logprob is None else _top(of, of.logprob) for of in likelihoods],
        "text_offset": offsets,
    }


def _top(of: Likelihood | PromptToken, logprob: float) -> dict[str, float]:
    return {_show(spelled): _finite(each) for spelled, each in [*of.top, (of.bytes, logprob)]}


def _show(spelled: bytes) -> str:
    """The token's text; of a part of a character, its bytes as `\\xNN`."""
    return spelled.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    # In this order, so that what is no number is the least likely too.
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN
