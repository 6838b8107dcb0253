"""Prepare requests: render the chat template, tokenize, fill in defaults, check limits.

A `TextPreparer` and its tokenizer belong to one thread. Nothing here runs an MLX operation.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from msgspec import UNSET

from protocol.common.model_folder import read_optional
from protocol.conversation import Conversation, unpack
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.settings.parsers import RECOGNIZED, NamedParsers
from protocol.types import TokenizeOptions
from worker.grammars.guide import AnswerGrammar
from worker.grammars.response_formats import is_json
from worker.input.prompts.boundaries import Messages, RenderedPrompt, find_boundaries
from worker.input.prompts.completion import Completion, encode
from worker.input.prompts.format import calling_of, closing_of, opening_of
from worker.input.prompts.grammar_choice import GrammarCache, GrammarSelector, offered
from worker.input.prompts.markup import HARMONY_HEAD, apply, complete
from worker.input.prompts.render_bound import RenderTimeout
from worker.input.prompts.sampling_defaults import draw_of
from worker.input.prompts.template import (
    RESERVED,
    TEMPLATE_ERRORS,
    Render,
    attempt,
    reason_of,
    render,
    template_of,
    unlisted_end,
)
from worker.input.prompts.token_limit import TokenLimit
from worker.output.channels import CONTENT, REASONING
from worker.values import (
    NEVER,
    CancelToken,
    EngineRequest,
    Grammar,
    ImageInput,
    SamplingParams,
    ThinkingBudget,
    Tokenized,
    keyed,
)

TOKENIZE_TOKENS_MIN = 2**17
TOKENIZE_CONTEXTS = 2
"""A tokenize-only prompt may have this many tokens, or this many times the context, whichever is more."""
PREDICTION_CHARACTERS_PER_TOKEN = 8
"""Characters of a prediction that are used, per token of the context. The rest could hardly be output."""

log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"
_SIDECAR = "chat_template.json"
"""Where older processors of vision models have the chat template."""
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
_MODULES = {"chat_template_type": "mlx_lm.chat_templates", "tool_parser_type": "mlx_lm.tool_parsers"}
"""Settings that name a module of mlx-lm's; a newer one may have more."""


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Limits and defaults of a model's requests. `context_length`, `vocabulary`: in tokens. `defaults`: their
    seed is not used. `by_memory`: memory limits the context to less than the model's."""

    context_length: int
    vocabulary: int
    defaults: SamplingParams
    by_memory: bool = False


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A rendered and tokenized prompt. `source`: the parameter that it came in. `messages`: as rendered; None
    for a raw prompt. `expand`: expands image placeholders in other renderings of them. `images`: as in
    `EngineRequest`, but `tokens` contains their real token ids."""

    source: str
    text: str
    tokens: list[int]
    messages: Messages | None = None
    expand: Callable[[str], str] = str
    images: tuple[ImageInput, ...] = ()


def open_tokenizer(
    folder: Path, end_tokens: Sequence[int], parsers: NamedParsers = RECOGNIZED
) -> TokenizerWrapper:
    """Open a tokenizer for one thread. `end_tokens`: the model config's; the tokenizer's own are added."""
    mended = mended_settings(folder)
    tokenizer: TokenizerWrapper = load_tokenizer(folder, mended, eos_token_ids=list(end_tokens))
    return apply(complete(tokenizer), parsers)


class TextPreparer:
    """`Preparer` for text prompts."""

    def __init__(
        self, tokenizer: TokenizerWrapper, rules: PromptRules, grammar_cache: GrammarCache | None = None
    ) -> None:
        """`tokenizer`: used by no other thread. `grammar_cache`: shared by the preparers of one model."""
        self._tokenizer = tokenizer
        self._render: Render | None = template_of(tokenizer)
        if self._render is not None and (end := unlisted_end(self._render, tokenizer)) is not None:
            tokenizer.eos_token_ids.add(end)
        self._added = added_tokens(tokenizer)
        self._completion = Completion(tokenizer, rules.vocabulary)
        self._rules = rules
        self._closing = closing_of(tokenizer, self._render)
        self._calling = calling_of(tokenizer)
        self._holder = GrammarSelector(
            tokenizer, self._render, rules.vocabulary, grammar_cache or GrammarCache()
        )

    def prepare(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> EngineRequest:
        limit = TokenLimit(self._rules.context_length, self._rules.by_memory, cancel_token)
        with _rendering(request):
            return self._prepared(request, media, limit)

    def _prepared(self, request: Generate, media: Sequence[bytes], limit: TokenLimit) -> EngineRequest:
        conversation = unpack(request)
        laid = self._lay(request, media, conversation, limit)
        source, tokens = laid.source, laid.tokens
        if not tokens:
            raise RequestError(Code.INVALID_REQUEST, f"The {source} must not be empty.", param=source)
        max_tokens = self._max_tokens(request, len(tokens), source, limit)
        opening = self._opening(conversation, laid)
        thoughts = self._thoughts(request, opening)
        rendered = self._rendered_prompt(laid)
        grammar = self._holder.grammar_of(request, conversation, opening, laid.text, limit.cancel_token)
        return EngineRequest(
            id=request.id,
            tokens=tuple(keyed(tokens, laid.images)),
            source=source,
            sampling=draw_of(
                request.sampling, self._rules.defaults, self._rules.vocabulary, thoughts, grammar
            ),
            stop=tuple(stop for stop in request.stop if stop),
            max_tokens=max_tokens,
            end_tokens=self._end_tokens(request, grammar),
            priority=request.priority,
            deadline_s=request.deadline_s,
            salt=request.cache_salt,
            adapter=request.adapter,
            session=request.session,
            parent_session=request.parent_session,
            pin=request.cache_pin,
            resume=tuple(request.resume),
            boundaries=self._boundaries(rendered, conversation, laid, limit.cancel_token),
            message_ends=rendered.message_ends(laid.messages or ()),
            opening=_opening_under(grammar, opening),
            echo=request.echo,
            scored=request.scored,
            echo_text=self._completion.echo_text(request),
            tools={tool.name: tool.schema for tool in offered(conversation)},
            single_call=request.calling is not None and request.calling.single,
            calls_only=request.calling is not None and bool(request.calling.required or request.calling.name),
            speculation=request.speculation,
            sparse=request.sparse,
            left_out=tuple(request.left_out),
            prediction=self._prediction(request),
            images=laid.images,
            relaxed=grammar.relaxed if isinstance(grammar, AnswerGrammar) else (),
        )

    def tokenize(
        self, request: Generate, media: Sequence[bytes], cancel_token: CancelToken = NEVER
    ) -> Tokenized:
        wanted = request.tokenizing or TokenizeOptions()
        tokens_max = max(TOKENIZE_TOKENS_MIN, TOKENIZE_CONTEXTS * self._rules.context_length)
        limit = TokenLimit(tokens_max, cancel_token=cancel_token)
        with _rendering(request):
            tokens = self._taken_apart(request, media, wanted, limit)
        return Tokenized(
            id=request.id,
            count=len(tokens),
            tokens=tuple(tokens) if wanted.tokens else (),
            pieces=self._pieces(tokens) if wanted.pieces else (),
            text=self._completion.echo_text(request),
        )

    def _taken_apart(
        self, request: Generate, media: Sequence[bytes], wanted: TokenizeOptions, limit: TokenLimit
    ) -> list[int]:
        conversation = unpack(request)
        if conversation.messages is None and wanted.special is not None and request.tokens is None:
            _refuse_media(request, media)
            text, source = request.prompt or "", request.source or "prompt"
            return self._encode(text, source, limit, special=wanted.special)
        special, opens_turn = bool(wanted.special), wanted.opens_turn
        return self._lay(request, media, conversation, limit, special=special, opens_turn=opens_turn).tokens

    def _lay(
        self,
        request: Generate,
        media: Sequence[bytes],
        conversation: Conversation,
        limit: TokenLimit,
        *,
        special: bool = False,
        opens_turn: bool = True,
    ) -> TokenizedPrompt:
        """Render and tokenize a prompt. `special`, `opens_turn`: for messages, see `TokenizeOptions`. Raises
        `RequestError`, but not for every prompt that exceeds the limit."""
        _refuse_media(request, media)
        messages = conversation.messages
        if messages is None:
            source, text = request.source or "prompt", request.prompt or ""
            return TokenizedPrompt(source, text, self._completion.tokens(request, text, source, limit))
        source = request.source or "messages"
        text = self._rendered(conversation, messages, opens_turn=opens_turn)
        tokens = self._encode(text, source, limit, special=special)
        return TokenizedPrompt(source, text, tokens, messages)

    def _prediction(self, request: Generate) -> tuple[int, ...]:
        text = request.prediction[: PREDICTION_CHARACTERS_PER_TOKEN * self._rules.context_length]
        limit = TokenLimit(len(text))
        return tuple(self._encode(text, "prediction", limit, special=False))

    def _pieces(self, tokens: list[int]) -> tuple[str, ...]:
        pieces: list[str | None] = self._tokenizer.convert_ids_to_tokens(tokens)
        return tuple(piece or "" for piece in pieces)  # the model may have more ids than the tokenizer

    def _opening(self, conversation: Conversation, laid: TokenizedPrompt) -> str | None:
        template, messages = self._render, laid.messages
        if messages is None or template is None:
            return None
        tools, options = conversation.tools, conversation.options
        # Rendered lazily: most prompts contain no unclosed reasoning.
        return opening_of(
            self._tokenizer,
            laid.text,
            lambda: laid.expand(attempt(template, messages, tools, options, opens_turn=False)),
        )

    def _thoughts(self, request: Generate, opening: str | None) -> ThinkingBudget | None:
        if request.thinking_budget is None or opening is None:
            return None
        if not self._closing:
            raise RequestError(
                Code.UNSUPPORTED_PARAMETER,
                "'thinking_budget' is not supported: this model has no single token that ends reasoning.",
                param="thinking_budget",
            )
        # White space after reasoning would become part of content that must match exactly.
        is_exact = request.form is not None and not is_json(request.form)
        return ThinkingBudget(
            tokens=max(1, request.thinking_budget),
            opening=tuple(self._tokenizer.think_start_tokens),
            closing=self._closing[:1] if is_exact else self._closing,
            is_open=opening == REASONING,
            calling=self._calling if request.tools is not UNSET else None,
        )

    def _end_tokens(self, request: Generate, grammar: Grammar | None) -> frozenset[int]:
        if request.ignore_eos and not isinstance(grammar, AnswerGrammar):  # an `AnswerGrammar` ends with one
            return frozenset()
        ends = frozenset(self._tokenizer.eos_token_ids)
        return ends | self._completion.gap_ends if request.suffix else ends

    def _rendered_prompt(self, laid: TokenizedPrompt) -> RenderedPrompt:
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return RenderedPrompt(laid.text, laid.tokens, self._added if laid.messages else {}, encode)

    def _boundaries(
        self,
        prompt: RenderedPrompt,
        conversation: Conversation,
        laid: TokenizedPrompt,
        cancel_token: CancelToken,
    ) -> tuple[int, ...]:
        template, messages = self._render, laid.messages
        if messages is None or template is None:
            return ()
        tools, options = conversation.tools, conversation.options

        def rendered(messages: Messages) -> str:
            cancel_token.check()
            return laid.expand(attempt(template, messages, tools, options))

        return find_boundaries(prompt, messages, rendered, with_tools=bool(tools))

    def _encode(self, text: str, source: str, limit: TokenLimit, *, special: bool) -> list[int]:
        """`special`: add the special tokens that the tokenizer puts around every text."""
        return encode(self._tokenizer, text, source, limit, special=special)

    def _rendered(self, conversation: Conversation, messages: Messages, *, opens_turn: bool = True) -> str:
        if self._render is None:
            raise RequestError(
                Code.INVALID_REQUEST,
                "This model has no chat template, so it takes no messages; use /v1/completions instead.",
                param="messages",
            )
        if reserved := sorted(RESERVED & conversation.options.keys()):
            raise RequestError(
                Code.INVALID_REQUEST,
                f"The chat template argument {reserved[0]!r} cannot be set.",
                param="chat_template_kwargs",
            )
        try:
            return render(
                self._render, messages, conversation.tools, conversation.options, opens_turn=opens_turn
            )
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                Code.INVALID_REQUEST,
                f"The model's chat template does not accept these messages: {reason_of(error)}",
                param="messages",
            ) from error

    def _max_tokens(self, request: Generate, prompt_tokens: int, source: str, limit: TokenLimit) -> int:
        room = limit.tokens_max - prompt_tokens
        if room < (0 if request.max_tokens == 0 else 1):
            raise limit.error(prompt_tokens, source)
        if request.max_tokens is None:
            return room
        if request.max_tokens < (0 if request.echo else 1):
            raise RequestError(Code.INVALID_REQUEST, "max_tokens must be at least 1.", param="max_tokens")
        return min(request.max_tokens, room)


@contextmanager
def _rendering(request: Generate) -> Iterator[None]:
    """Context manager that turns `RenderTimeout` into a `RequestError`."""
    try:
        yield
    except RenderTimeout as error:
        message = f"The model's chat template does not accept these messages: {error}"
        raise RequestError(Code.INVALID_REQUEST, message, param=request.source or "messages") from None


def _opening_under(grammar: Grammar | None, opening: str | None) -> str | None:
    """Return the state in which the answer begins; None: it contains no markers."""
    if _is_raw(grammar):
        return None
    # Such a grammar may begin with the content itself; a head is read from there too.
    return CONTENT if opening == HARMONY_HEAD and isinstance(grammar, AnswerGrammar) else opening


def _is_raw(grammar: Grammar | None) -> bool:
    """Return whether the answer contains no markers: structured output from its first token on."""
    if not isinstance(grammar, AnswerGrammar):
        return False
    return grammar.is_text and grammar.opening == CONTENT and not grammar.hidden


def _refuse_media(request: Generate, media: Sequence[bytes]) -> None:
    if request.media or media:
        message = "This model accepts text only, no images."
        param = next((each.param for each in request.media if each.param), "messages")
        raise RequestError(Code.UNSUPPORTED_MEDIA, message, param=param)


def added_tokens(tokenizer: TokenizerWrapper) -> dict[int, str]:
    """Return the texts of added tokens by id; empty for Mistral's own tokenizers, which do not list them."""
    try:
        return {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
    except NotImplementedError:
        return {}


def mended_settings(folder: Path) -> dict[str, Any]:
    """Return settings that replace those of a folder's tokenizer_config.json; empty for most folders."""
    settings = read_optional(folder / _CONFIG)
    mended: dict[str, Any] = {}
    for key, package in _MODULES.items():
        name = settings.get(key)
        if name is not None and not _is_module(package, name):
            log.warning("%s: %s is ignored: this mlx-lm has no %r", folder / _CONFIG, key, name)
            mended[key] = None
    if not settings.get("chat_template") and not any((folder / each).exists() for each in _TEMPLATES):
        template = read_optional(folder / _SIDECAR).get("chat_template")
        if isinstance(template, str) and template:
            mended["chat_template"] = template
    return mended


def _is_module(package: str, name: object) -> bool:
    if not isinstance(name, str) or not name.isidentifier():
        return False
    return importlib.util.find_spec(f"{package}.{name}") is not None
