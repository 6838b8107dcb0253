"""Token limit of a text: long texts are counted in slices, and refused before the whole of one is tokenized.

Tokenizing takes about 450 bytes of memory a token, and cannot be interrupted. So a text that may have far
more tokens than the limit is first tokenized slice by slice, only to be counted, until it is certain to be
too long. The tokens of a prompt always come from one call over the whole text, so they are exact. Only the
refusal relies on slices: a text is refused if they have more than `SLACK` times the limit, plus `CUT_TOKENS`
for each cut. A cut changes the tokens of a word or two; the rest is a margin. A text with fewer is tokenized,
and its exact number decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from protocol.errors import RequestError, too_long
from worker.values import NEVER, CancelToken

SLICE_CHARACTERS = 2**16
"""Characters that are tokenized at once; other threads can run, and the request be cancelled, in between."""
WHOLE_BYTES_PER_TOKEN = 4
WHOLE_BYTES_MAX = 2**18
"""A text of at most this many bytes for each token of the limit, and in total, is not counted in advance."""
SLACK = 1.25
CUT_TOKENS = 128
"""Tokens by which a cut may change the count. In WordPiece, a word of more than 100 characters is one token,
but its part may have as many as characters."""
_WORD_CHARACTERS = 256
"""Distance from the end of a slice within which it is cut before white space, if there is any."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Maximum number of tokens of a prompt. `by_memory`: memory limits the context, not the model.
    `cancel_token`: checked between slices."""

    tokens_max: int
    by_memory: bool = False
    cancel_token: CancelToken = NEVER

    def check(self, tokens: int, source: str) -> None:
        """Raise `RequestError(context_length_exceeded)` if `tokens` are too many. `source`: the parameter."""
        if tokens > self.tokens_max:
            raise self.error(tokens, source)

    def check_text(self, text: str, source: str, encode: Encode) -> None:
        """Raise `RequestError(context_length_exceeded)` if a text is certain to have too many tokens.

        Raises `PreparationCancelled` after a cancellation, and whatever `encode` raises.
        """
        self.cancel_token.check()
        if is_small(text, self.tokens_max):
            return
        count = 0
        for number, piece in enumerate(slices(text)):
            self.cancel_token.check()
            count += len(encode(piece))
            if count > SLACK * self.tokens_max + CUT_TOKENS * number:
                raise self.error(self.tokens_max, source, is_partial=True)

    def error(self, tokens: int, source: str, *, is_partial: bool = False) -> RequestError:
        """Return the error for a prompt of `tokens` tokens, or of more if `is_partial`."""
        return too_long(self.tokens_max, tokens, source, by_memory=self.by_memory, is_partial=is_partial)


def is_small(text: str, tokens_max: int) -> bool:
    """Return whether a text is so small that it can be tokenized whole, whatever its tokens."""
    if len(text) <= SLICE_CHARACTERS:
        return True
    bytes_max = min(WHOLE_BYTES_PER_TOKEN * tokens_max, WHOLE_BYTES_MAX)
    return len(text) <= bytes_max and len(text.encode(errors="surrogatepass")) <= bytes_max


def slices(text: str) -> Iterator[str]:
    """Cut a text into slices of at most `SLICE_CHARACTERS`, where possible before a space or a line break."""
    start = 0
    while start < len(text):
        end = start + SLICE_CHARACTERS
        if end < len(text):
            near = max(text.rfind(blank, end - _WORD_CHARACTERS, end) for blank in " \n")
            end = near if near > start else end
        yield text[start:end]
        start = end


def beginning(text: str, tokens_max: int, encode: Encode, cancel_token: CancelToken) -> str:
    """Return the beginning of a text that is going to be truncated to `tokens_max` tokens.

    Its first `tokens_max` tokens are those of the whole text: at least as many follow in what is returned.
    """
    if is_small(text, tokens_max):
        return text
    count = length = 0
    for number, piece in enumerate(slices(text)):
        cancel_token.check()
        count += len(encode(piece))
        length += len(piece)
        if count > SLACK * tokens_max + CUT_TOKENS * (number + 1):
            break
    return text[:length]
