"""Prompts that are no conversations: text or tokens that are to go on, or to have a gap filled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import Code, RequestError
from protocol.messages import Generate
from worker.models.infill import infilling_of


class Completion:
    """With the tokenizer of one thread. `vocabulary`: how many tokens the model has."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._infilling = infilling_of(tokenizer.get_vocab())

    @property
    def gap_ends(self) -> frozenset[int]:
        """What ends the filling of a gap, besides the model's own ends."""
        return self._infilling.ends if self._infilling else frozenset()

    def tokens(self, request: Generate, text: str, source: str) -> list[int]:
        """The tokens of what is to go on, as text or as ids."""
        begins = self._tokenizer.bos_token
        # As in `mlx_lm.stream_generate`: a prompt that brings its own beginning gets no second one.
        special = begins is None or not text.startswith(begins)
        if request.suffix:
            return self._infilled(request, text, source, special=special)
        if request.tokens is None:
            return encode(self._tokenizer, text, source, special=special)
        self._check_tokens(request.tokens, source)
        return request.tokens

    def _infilled(self, request: Generate, text: str, source: str, *, special: bool) -> list[int]:
        if self._infilling is None:
            message = "'suffix' is not served: this model's tokenizer names no tokens to fill a gap with."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param="suffix")
        if request.tokens is None:
            opening = self._tokenizer.encode("", add_special_tokens=True) if special else []
            prefix = encode(self._tokenizer, text, source, special=False)
        else:
            self._check_tokens(request.tokens, source)
            opening, prefix = [], request.tokens
        plain = partial(encode, self._tokenizer, source="suffix", special=False)
        return self._infilling.tokens(opening, prefix, request.suffix, plain)

    def _check_tokens(self, tokens: Sequence[int], source: str) -> None:
        last = self._vocabulary - 1
        for index, token in enumerate(tokens):
            if token > last:
                which = f"{source}[{index}]"
                message = f"'{which}' is token {token}, and this model's tokens are 0 to {last}."
                raise RequestError(Code.INVALID_REQUEST, message, param=which)

    def echo_text(self, request: Generate) -> str:
        """The text of a prompt of ids that is to be told; empty: it is not, or the client knows it."""
        if not request.echo or request.tokens is None:
            return ""
        # With the names of special tokens: the text is to be the whole prompt.
        known = [token for token in request.tokens if token < len(self._tokenizer)]
        return str(
            self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


def encode(tokenizer: TokenizerWrapper, text: str, source: str, *, special: bool) -> list[int]:
    """The tokens of a text from the parameter `source`. `special`: with what the tokenizer puts around every
    text. Raises `RequestError` for what is no text."""
    try:
        return tokenizer.encode(text, add_special_tokens=special) if text else []
    except (TypeError, ValueError) as error:  # half a surrogate pair, for one, is no text
        raise RequestError(
            Code.INVALID_REQUEST, f"The {source} cannot be tokenized: {error}", param=source
        ) from error
