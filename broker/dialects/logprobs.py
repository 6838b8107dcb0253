"""Logprobs in OpenAI's formats: chat's list of entries, and the four lists of legacy completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from protocol.types import PromptToken, TokenLogprob

LOGPROB_MIN = -9999.0
"""Replacement for minus infinity, which JSON cannot express."""


def chat_logprobs(likelihoods: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of chat completions, for a document or a chunk."""
    return {"content": entries(likelihoods), "refusal": None}


def entries(likelihoods: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return one entry per token, in the format of chat completions and responses."""
    return [
        _entry(of.bytes, of.logprob) | {"top_logprobs": [_entry(*one) for one in of.top]}
        for of in likelihoods
    ]


def _entry(spelled: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _show(spelled), "logprob": _finite(logprob), "bytes": list(spelled)}


class LegacyLogprobs:
    """Stateful `choices[].logprobs` of a completion, one per choice: it tracks the character offset."""

    def __init__(self, offset: int = 0) -> None:
        """`offset`: offset of the first token, in characters."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def take(self, likelihoods: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the four lists of the next tokens. A token that begins within a character has its offset."""
        offsets = []
        for of in likelihoods:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(of.bytes))
        return legacy_lists(likelihoods, offsets)


def legacy_lists(likelihoods: Sequence[TokenLogprob | PromptToken], offsets: list[int]) -> dict[str, Any]:
    """Return the four lists of tokens. Each token is added to its own `top_logprobs` if it is not there.

    The first token of a prompt has no logprobs.
    """
    return {
        "tokens": [_show(of.bytes) for of in likelihoods],
        "token_logprobs": [None if of.logprob is None else _finite(of.logprob) for of in likelihoods],
        "top_logprobs": [None if of.logprob is None else _top(of, of.logprob) for of in likelihoods],
        "text_offset": offsets,
    }


def _top(of: TokenLogprob | PromptToken, logprob: float) -> dict[str, float]:
    return {_show(spelled): _finite(each) for spelled, each in [*of.top, (of.bytes, logprob)]}


def _show(spelled: bytes) -> str:
    """Return the token's text; bytes of an incomplete character are shown as `\\xNN`."""
    return spelled.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    # In this order NaN becomes the minimum too.
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN
