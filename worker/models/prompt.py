"""From a request to the tokens the model is given: rendering, tokenizer, defaults, limits.

A `TextPreparer` belongs to one thread and so does its tokenizer. Nothing here runs an MLX operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from msgspec import UNSET

from protocol.conversation import Conversation, unpack
from protocol.errors import Code, RequestError, too_long
from protocol.messages import Generate
from protocol.parts import Tokenizing
from worker.contract import Draw, Prepared, ThoughtLimit, Tokenized
from worker.grammars.forms import is_json
from worker.grammars.guide import HeldGrammar
from worker.guides import Grammar
from worker.models.boundaries import Messages, Prompt, find_boundaries
from worker.models.completion import Completion, encode
from worker.models.draw import draw_of
from worker.models.format import calling_of, closing_of, opening_of
from worker.models.holding import Held, Holder, offered
from worker.models.template import (
    RESERVED,
    TEMPLATE_ERRORS,
    attempt,
    find_unknown_wishes,
    render,
    template_of,
)
from worker.output.channels import CONTENT, REASONING
from worker.pictures import Picture, keyed


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What a model's requests are measured by, in tokens. Of `defaults` the seed is not used. `by_memory`:
    the model could take a longer context."""

    context_length: int
    vocabulary: int
    defaults: Draw
    by_memory: bool = False


@dataclass(frozen=True, slots=True)
class Laid:
    """A prompt laid together: its text and its tokens, from the parameter `source`. `messages`: as they were
    rendered, if it was messages. `expand`: what is put into any rendering of them. `pictures`: see
    `Prepared`; `tokens` has theirs by their real numbers."""

    source: str
    text: str
    tokens: list[int]
    messages: Messages | None = None
    expand: Callable[[str], str] = str
    pictures: tuple[Picture, ...] = ()


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
        self._added = added_tokens(tokenizer)
        self._completion = Completion(tokenizer, rules.vocabulary)
        self._rules = rules
        self._unknown = find_unknown_wishes(self._render) if self._render else frozenset()
        self._closing = closing_of(tokenizer, self._render)
        self._calling = calling_of(tokenizer)
        self._holder = Holder(tokenizer, self._render, rules.vocabulary, held or Held())

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        """See `contract.Preparer`."""
        conversation = self._heeded(unpack(request))
        laid = self._lay(request, media, conversation)
        source, tokens = laid.source, laid.tokens
        if not tokens:
            raise RequestError(Code.INVALID_REQUEST, f"The {source} must not be empty.", param=source)
        opening = self._opening(conversation, laid)
        thoughts = self._thoughts(request, opening)
        grammar = self._holder.grammar_of(request, conversation, opening, laid.text)
        return Prepared(
            id=request.id,
            tokens=tuple(keyed(tokens, laid.pictures)),
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
            boundaries=self._boundaries(conversation, laid),
            opening=None if _is_raw(grammar) else opening,
            echo=request.echo,
            scored=request.scored,
            echo_text=self._completion.echo_text(request),
            tools={tool.name: tool.schema for tool in offered(conversation)},
            single_call=request.calling is not None and request.calling.single,
            speculation=request.speculation,
            prediction=tuple(self._encode(request.prediction, "prediction", special=False)),
            pictures=laid.pictures,
        )

    def tokenize(self, request: Generate, media: Sequence[bytes]) -> Tokenized:
        """See `contract.Preparer`."""
        wanted = request.tokenizing or Tokenizing()
        tokens = self._taken_apart(request, media, wanted)
        return Tokenized(
            id=request.id,
            count=len(tokens),
            tokens=tuple(tokens) if wanted.tokens else (),
            pieces=self._pieces(tokens) if wanted.pieces else (),
            text=self._completion.echo_text(request),
        )

    def _taken_apart(self, request: Generate, media: Sequence[bytes], wanted: Tokenizing) -> list[int]:
        conversation = self._heeded(unpack(request))
        if conversation.messages is None and wanted.special is not None and request.tokens is None:
            _refuse_media(request, media)
            return self._encode(request.prompt or "", request.source or "prompt", special=wanted.special)
        special, opens_turn = bool(wanted.special), wanted.opens_turn
        return self._lay(request, media, conversation, special=special, opens_turn=opens_turn).tokens

    def _lay(
        self,
        request: Generate,
        media: Sequence[bytes],
        conversation: Conversation,
        *,
        special: bool = False,
        opens_turn: bool = True,
    ) -> Laid:
        """`special`, `opens_turn`: of messages, see `Tokenizing`."""
        _refuse_media(request, media)
        messages = conversation.messages
        if messages is None:
            source, text = request.source or "prompt", request.prompt or ""
            return Laid(source, text, self._completion.tokens(request, text, source))
        source = request.source or "messages"
        text = self._rendered(conversation, messages, opens_turn=opens_turn)
        return Laid(source, text, self._encode(text, source, special=special), messages)

    def _pieces(self, tokens: list[int]) -> tuple[str, ...]:
        pieces: list[str | None] = self._tokenizer.convert_ids_to_tokens(tokens)
        return tuple(piece or "" for piece in pieces)  # the model may have more ids than the tokenizer

    def _heeded(self, conversation: Conversation) -> Conversation:
        """Without the wishes that this model's template does not know."""
        if not self._unknown & conversation.options.keys():
            return conversation
        options = {name: wish for name, wish in conversation.options.items() if name not in self._unknown}
        return replace(conversation, options=options)

    def _opening(self, conversation: Conversation, laid: Laid) -> str | None:
        template, messages = self._render, laid.messages
        if messages is None or template is None:
            return None
        tools, options = conversation.tools, conversation.options
        # Rarely asked for: most prompts leave no thought open anywhere.
        return opening_of(
            self._tokenizer,
            laid.text,
            lambda: laid.expand(attempt(template, messages, tools, options, opens_turn=False)),
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

    def _end_tokens(self, request: Generate, grammar: Grammar | None) -> frozenset[int]:
        if request.ignore_eos and not isinstance(grammar, HeldGrammar):  # which ends with one of them
            return frozenset()
        ends = frozenset(self._tokenizer.eos_token_ids)
        return ends | self._completion.gap_ends if request.suffix else ends

    def _boundaries(self, conversation: Conversation, laid: Laid) -> tuple[int, ...]:
        template, messages = self._render, laid.messages
        if messages is None or template is None:
            return ()
        tools, options = conversation.tools, conversation.options
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return find_boundaries(
            Prompt(laid.text, laid.tokens, self._added, encode),
            messages,
            lambda messages: laid.expand(attempt(template, messages, tools, options)),
            with_tools=bool(tools),
        )

    def _encode(self, text: str, source: str, *, special: bool) -> list[int]:
        """`special`: with what the tokenizer puts around every text."""
        return encode(self._tokenizer, text, source, special=special)

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
        param = next((each.param for each in request.media if each.param), "messages")
        raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=param)


def added_tokens(tokenizer: TokenizerWrapper) -> dict[int, str]:
    """The texts that are cut out before all others, by token. Mistral's own tokenizers do not tell theirs."""
    try:
        return {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
    except NotImplementedError:
        return {}
