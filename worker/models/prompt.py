"""From a request to the tokens the model is given: rendering, tokenizer, defaults, limits.

A `TextPreparer` belongs to one thread and so does its tokenizer. Nothing here runs an MLX operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from msgspec import UNSET

from protocol.conversation import Conversation, unpack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.parts import Tokenizing
from worker.contract import Draw, Grammar, Prepared, ThoughtLimit, Tokenized, too_long
from worker.grammars.forms import is_json
from worker.grammars.guide import HeldGrammar
from worker.models.boundaries import Messages, Prompt, find_boundaries
from worker.models.draw import draw_of
from worker.models.format import calling_of, closing_of, opening_of
from worker.models.holding import Held, Holder, offered
from worker.models.infill import infilling_of
from worker.models.template import (
    RESERVED,
    TEMPLATE_ERRORS,
    attempt,
    find_unknown_wishes,
    render,
    template_of,
)
from worker.output.channels import CONTENT, REASONING


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What a model's requests are measured by, in tokens. Of `defaults` the seed is not used. `by_memory`:
    the model could take a longer context."""

    context_length: int
    vocabulary: int
    defaults: Draw
    by_memory: bool = False


def open_tokenizer(folder: Path, end_tokens: Sequence[int]) -> TokenizerWrapper:
    """A tokenizer for one thread. `end_tokens`: those of the model's configuration; its own are added."""
    tokenizer: TokenizerWrapper = load_tokenizer(folder, eos_token_ids=list(end_tokens))
    return tokenizer


class TextPreparer:
    """`contract.Preparer` for models that take text."""

    def __init__(self, tokenizer: TokenizerWrapper, rules: PromptRules, held: Held | None = None) -> None:
        """`tokenizer`: used by no other thread. `held`: shared by the preparers of one model."""
        self._tokenizer = tokenizer
        self._render = template_of(tokenizer)
        self._added = _added_tokens(tokenizer)
        self._infilling = infilling_of(tokenizer.get_vocab())
        self._rules = rules
        self._unknown = find_unknown_wishes(self._render) if self._render else frozenset()
        self._closing = closing_of(tokenizer, self._render)
        self._calling = calling_of(tokenizer)
        self._holder = Holder(tokenizer, self._render, rules.vocabulary, held or Held())

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        """See `contract.Preparer`."""
        _refuse_media(request, media)
        conversation = self._heeded(unpack(request))
        if conversation.messages is None:
            source, text = request.source or "prompt", request.prompt or ""
            tokens = self._completed(request, text, source)
        else:
            source, text = request.source or "messages", self._rendered(conversation, conversation.messages)
            tokens = self._encode(text, source, special=False)
        if not tokens:
            raise RequestError(Code.INVALID_REQUEST, f"The {source} must not be empty.", param=source)
        opening = self._opening(conversation, text)
        thoughts = self._thoughts(request, opening)
        grammar = self._holder.grammar_of(request, conversation, opening, text)
        return Prepared(
            id=request.id,
            tokens=tuple(tokens),
            source=source,
            draw=draw_of(request.sampling, self._rules.defaults, self._rules.vocabulary, thoughts, grammar),
            stop=tuple(stop for stop in request.stop if stop),
            max_tokens=self._max_tokens(request, len(tokens), source),
            end_tokens=self._end_tokens(request, grammar),
            priority=request.priority,
            deadline_s=request.deadline_s,
            salt=request.cache_salt,
            pin=request.cache_pin,
            resume=tuple(request.resume),
            boundaries=self._boundaries(conversation, text, tokens),
            opening=None if _is_raw(grammar) else opening,
            echo=request.echo,
            scored=request.scored,
            echo_text=self._echo_text(request),
            tools={tool.name: tool.schema for tool in offered(conversation)},
            single_call=request.calling is not None and request.calling.single,
        )

    def tokenize(self, request: Generate, media: Sequence[bytes]) -> Tokenized:
        """See `contract.Preparer`."""
        _refuse_media(request, media)
        wanted = request.tokenizing or Tokenizing()
        tokens = self._taken_apart(request, wanted)
        return Tokenized(
            id=request.id,
            count=len(tokens),
            tokens=tuple(tokens) if wanted.tokens else (),
            pieces=self._pieces(tokens) if wanted.pieces else (),
            text=self._echo_text(request),
        )

    def _taken_apart(self, request: Generate, wanted: Tokenizing) -> list[int]:
        conversation = self._heeded(unpack(request))
        if conversation.messages is not None:
            text = self._rendered(conversation, conversation.messages, opens_turn=wanted.opens_turn)
            return self._encode(text, "messages", special=bool(wanted.special))
        source, text = request.source or "prompt", request.prompt or ""
        if wanted.special is None or request.tokens is not None:
            return self._completed(request, text, source)
        return self._encode(text, source, special=wanted.special)

    def _pieces(self, tokens: list[int]) -> tuple[str, ...]:
        pieces: list[str | None] = self._tokenizer.convert_ids_to_tokens(tokens)
        return tuple(piece or "" for piece in pieces)  # the model may have more ids than the tokenizer

    def _heeded(self, conversation: Conversation) -> Conversation:
        """Without the wishes that this model's template does not know."""
        if not self._unknown & conversation.options.keys():
            return conversation
        options = {name: wish for name, wish in conversation.options.items() if name not in self._unknown}
        return replace(conversation, options=options)

    def _opening(self, conversation: Conversation, text: str) -> str | None:
        template, messages = self._render, conversation.messages
        if messages is None or template is None:
            return None
        # Rarely asked for: most prompts leave no thought open anywhere.
        return opening_of(
            self._tokenizer,
            text,
            lambda: attempt(template, messages, conversation.tools, conversation.options, opens_turn=False),
        )

    def _thoughts(self, request: Generate, opening: str | None) -> ThoughtLimit | None:
        if request.thinking_budget is None or opening is None:
            return None
        if not self._closing:
            raise RequestError(
                Code.UNSUPPORTED_PARAMETER,
                "'thinking_budget' is not served here: this model has no token that ends a thought.",
                param="thinking_budget",
            )
        # White space behind a thought would be part of a content that is to be exact.
        is_exact = request.form is not None and not is_json(request.form)
        return ThoughtLimit(
            tokens=max(1, request.thinking_budget),
            opening=tuple(self._tokenizer.think_start_tokens),
            closing=self._closing[:1] if is_exact else self._closing,
            is_open=opening == REASONING,
            calling=self._calling if request.tools is not UNSET else None,
        )

    def _completed(self, request: Generate, text: str, source: str) -> list[int]:
        """The tokens of what is to go on, as text or as ids."""
        begins = self._tokenizer.bos_token
        # As in `mlx_lm.stream_generate`: a prompt that brings its own beginning gets no second one.
        special = begins is None or not text.startswith(begins)
        if request.suffix:
            return self._infilled(request, text, source, special=special)
        if request.tokens is None:
            return self._encode(text, source, special=special)
        self._check_tokens(request.tokens, source)
        return request.tokens

    def _infilled(self, request: Generate, text: str, source: str, *, special: bool) -> list[int]:
        if self._infilling is None:
            message = "'suffix' is not served: this model's tokenizer names no tokens to fill a gap with."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param="suffix")
        if request.tokens is None:
            opening = self._tokenizer.encode("", add_special_tokens=True) if special else []
            prefix = self._encode(text, source, special=False)
        else:
            self._check_tokens(request.tokens, source)
            opening, prefix = [], request.tokens
        return self._infilling.tokens(
            opening, prefix, request.suffix, lambda part: self._encode(part, "suffix", special=False)
        )

    def _check_tokens(self, tokens: Sequence[int], source: str) -> None:
        last = self._rules.vocabulary - 1
        for index, token in enumerate(tokens):
            if token > last:
                which = f"{source}[{index}]"
                message = f"'{which}' is token {token}, and this model's tokens are 0 to {last}."
                raise RequestError(Code.INVALID_REQUEST, message, param=which)

    def _echo_text(self, request: Generate) -> str:
        if not request.echo or request.tokens is None:
            return ""
        # With the names of special tokens: the text is to be the whole prompt.
        known = [token for token in request.tokens if token < len(self._tokenizer)]
        return str(
            self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _end_tokens(self, request: Generate, grammar: Grammar | None) -> frozenset[int]:
        if request.ignore_eos and not isinstance(grammar, HeldGrammar):  # which ends with one of them
            return frozenset()
        ends = frozenset(self._tokenizer.eos_token_ids)
        return ends | self._infilling.ends if request.suffix and self._infilling else ends

    def _boundaries(self, conversation: Conversation, text: str, tokens: list[int]) -> tuple[int, ...]:
        template = self._render
        if conversation.messages is None or template is None:
            return ()
        prompt = Prompt(text, tokens, self._added, partial(self._tokenizer.encode, add_special_tokens=False))
        return find_boundaries(
            prompt,
            conversation.messages,
            lambda messages: attempt(template, messages, conversation.tools, conversation.options),
            with_tools=bool(conversation.tools),
        )

    def _encode(self, text: str, source: str, *, special: bool) -> list[int]:
        """`special`: with what the tokenizer puts around every text."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=special) if text else []
        except (TypeError, ValueError) as error:  # half a surrogate pair, for one, is no text
            raise RequestError(
                Code.INVALID_REQUEST, f"The {source} cannot be tokenized: {error}", param=source
            ) from error

    def _rendered(self, conversation: Conversation, messages: Messages, *, opens_turn: bool = True) -> str:
        if self._render is None:
            raise RequestError(
                Code.INVALID_REQUEST,
                "This model has no chat template and takes no messages; use /v1/completions with a prompt.",
                param="messages",
            )
        if reserved := sorted(RESERVED & conversation.options.keys()):
            raise RequestError(
                Code.INVALID_REQUEST,
                f"The chat template takes no argument {reserved[0]!r}.",
                param="chat_template_kwargs",
            )
        try:
            return render(
                self._render, messages, conversation.tools, conversation.options, opens_turn=opens_turn
            )
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                Code.INVALID_REQUEST,
                f"The model's chat template does not take these messages: {error}",
                param="messages",
            ) from error

    def _max_tokens(self, request: Generate, prompt_tokens: int, source: str) -> int:
        room = self._rules.context_length - prompt_tokens
        if room < (0 if request.max_tokens == 0 else 1):
            rules = self._rules
            raise too_long(rules.context_length, prompt_tokens, source, by_memory=rules.by_memory)
        if request.max_tokens is None:
            return room
        if request.max_tokens < (0 if request.echo else 1):
            raise RequestError(Code.INVALID_REQUEST, "max_tokens must be at least 1.", param="max_tokens")
        return min(request.max_tokens, room)


def _is_raw(grammar: Grammar | None) -> bool:
    """Whether nothing in the answer is a marker: it is content from its first token, held to a form."""
    if not isinstance(grammar, HeldGrammar):
        return False
    return grammar.is_text and grammar.opening == CONTENT and not grammar.thought


def _refuse_media(request: Generate, media: Sequence[bytes]) -> None:
    if request.media or media:
        message = "This model takes text only; it cannot see images."
        raise RequestError(Code.UNSUPPORTED_MEDIA, message, param="messages")


def _added_tokens(tokenizer: TokenizerWrapper) -> dict[int, str]:
    """The texts that are cut out before all others, by token. Mistral's own tokenizers do not tell theirs."""
    try:
        return {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
    except NotImplementedError:
        return {}
