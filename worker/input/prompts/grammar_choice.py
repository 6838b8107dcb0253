"""Structured output: choose a request's grammar by its response format, tools and the model's call format."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.conversation import Conversation
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.types import StructuredOutput, ToolCallConstraint
from worker.grammars import response_formats
from worker.grammars.calls import CallForm as CallForm
from worker.grammars.calls import CallsGrammar, ToolSchema
from worker.grammars.compiler import (
    COMPILE_S_MAX,
    CompileBudget,
    Compiler,
    CompilerBusyError,
    GrammarError,
    GrammarTimeoutError,
)
from worker.grammars.guide import AnswerGrammar, CallGrammar, Markup
from worker.grammars.references import SchemaError
from worker.grammars.response_formats import compile_relaxed
from worker.grammars.schema import Relaxation
from worker.grammars.tokenizer import GrammarTokenizer
from worker.input.locks import acquired
from worker.input.prompts.format import edges_of
from worker.input.prompts.markup import (
    HARMONY_CALL,
    HARMONY_HEAD,
    HARMONY_HEADS,
    HARMONY_THOUGHT,
    is_harmony,
)
from worker.input.prompts.template import Render, opens_thoughts, rendered_calls, spacing_in
from worker.output.channels import CALL, CONTENT, Edges
from worker.output.text import Vocabulary
from worker.values import NEVER, CancelToken, Grammar

log = logging.getLogger(__name__)

ANY_PARAMETERS = "parameters"
"""Stands in `AnswerGrammar.relaxed` for the whole schema of a tool that may be called with any object."""
_TRIAL_SHARE = 0.5
"""Share of the time left for a grammar without which there is a simpler one."""
_LEFT_S_MIN = 0.1
"""With less time left, no more grammars are tried."""


class GrammarCache:
    """Grammar tokenizer and compiler of one model, shared by its preparers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[GrammarTokenizer, Compiler] | None = None

    def open(self, tokenizer: TokenizerWrapper, width: int) -> tuple[GrammarTokenizer, Compiler] | None:
        """Return the grammar tokenizer and compiler; the first call creates them with its thread's tokenizer.

        None: structured output is unavailable, because the model has no end token or llguidance rejects its
        tokens. Raises `TimeoutError`: see `acquired`.
        """
        ends = [token for token in tokenizer.eos_token_ids if token < width]
        with acquired(self._lock, "the grammar tokenizer"):
            if self._opened is None and ends:
                self._opened = _opened(tokenizer, width, ends)
            return self._opened


def _opened(
    tokenizer: TokenizerWrapper, width: int, ends: Sequence[int]
) -> tuple[GrammarTokenizer, Compiler] | None:
    vocabulary = Vocabulary(tokenizer._tokenizer)
    try:
        lexicon = GrammarTokenizer(vocabulary.spell, width, _names(tokenizer, vocabulary, ends), ends)
    except ValueError as error:
        log.warning("structured output is not available: %s", error)
        return None
    return lexicon, Compiler(lexicon)


class GrammarSelector:
    """Chooses and compiles the grammars of requests; one per preparer."""

    def __init__(
        self, tokenizer: TokenizerWrapper, template: Render | None, width: int, grammar_cache: GrammarCache
    ) -> None:
        self._tokenizer = tokenizer
        self._opened = grammar_cache.open(tokenizer, width)
        if self._opened is None:
            return
        self._lexicon, self._compiler = self._opened
        self._budget = CompileBudget(self._compiler)
        self._form = _call_form(tokenizer, template, self._lexicon)
        self._markup = Markup(_edges(tokenizer, self._form.start), self._lexicon)
        start = tokenizer.think_start if template else None
        self._thinks_unasked = bool(template and start and not opens_thoughts(template, start))

    def grammar_of(
        self,
        request: Generate,
        conversation: Conversation,
        opening: str | None,
        text: str,
        cancel_token: CancelToken = NEVER,
    ) -> Grammar | None:
        """Return the grammar of the answer to the prompt `text`; None: free text. Raises `RequestError`."""
        form, calling = request.form, request.calling or ToolCallConstraint()
        tools = offered(conversation)
        is_called = bool(tools) and (calling.required or bool(calling.name))
        if form is None and not is_called and not (tools and calling.strict):
            return None
        if self._opened is None:
            message = "Structured output is not supported with this model's tokens."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param=form.param if form else "tools")
        self._budget = CompileBudget(self._compiler, cancel_token)
        state = CONTENT if opening in (None, HARMONY_HEAD) else str(opening)
        try:
            if is_called:
                return self._required(tools, calling, conversation, state, text)
            if form is None:
                return self._strict(tools, calling, state)
            return self._of_form(form, tools, calling, conversation, state, text)
        except GrammarTimeoutError:
            name = "tools" if form is None else form.param or "response_format"
            message = f"The schemas in '{name}' take longer than {COMPILE_S_MAX:g} s to compile."
            raise _refused(message, name) from None
        except CompilerBusyError:
            message = "Other grammars are being compiled."
            raise RequestError(Code.TEXT_GENERATION_BUSY, message, retry_after_s=COMPILE_S_MAX) from None

    def _of_form(
        self,
        form: StructuredOutput,
        tools: Sequence[ToolSchema],
        calling: ToolCallConstraint,
        conversation: Conversation,
        state: str,
        text: str,
    ) -> Grammar:
        name = form.param or "response_format"
        relaxed: tuple[str, ...] = ()
        try:
            if form.strict:
                body = self._budget.compile(response_formats.grammar_of(form))
            else:
                write = partial(response_formats.grammar_of, form)
                body, relaxed = compile_relaxed(write, self._budget.compile)
        except SchemaError as error:
            raise _refused(f"The format in '{name}' {error}.", name) from None
        except GrammarTimeoutError:
            raise
        except GrammarError as error:
            raise _refused(f"'{name}' is not supported: {_explained(str(error))}.", name) from None
        # With tools, the answer may consist of calls instead.
        bodies = (body, self._calls(_loosened(tools, calling), calling)) if tools else (body,)
        return AnswerGrammar(
            bodies,
            self._lexicon,
            self._markup,
            state,
            self._thought(conversation, text),
            has_blanks=response_formats.is_json(form),
            is_text=not tools,
            relaxed=relaxed,
        )

    def _required(
        self,
        tools: Sequence[ToolSchema],
        calling: ToolCallConstraint,
        conversation: Conversation,
        state: str,
        text: str,
    ) -> Grammar:
        chosen = [tool for tool in tools if calling.name in ("", tool.name)]
        if not chosen:
            raise _refused(
                f"'tool_choice' names the tool '{calling.name}', which is not in 'tools'.", "tool_choice"
            )
        body, relaxed = self._held_calls(chosen, calling)
        hidden = self._thought(conversation, text)
        return AnswerGrammar(
            (body,), self._lexicon, self._markup, state, hidden, has_blanks=True, relaxed=relaxed
        )

    def _held_calls(
        self, tools: Sequence[ToolSchema], calling: ToolCallConstraint
    ) -> tuple[Any, tuple[str, ...]]:
        """Compile calls with all tools' schemas, relaxed unless strict, and return what is not enforced.

        A schema that cannot be relaxed, as it is malformed or too large, becomes any object.
        """
        try:
            return self._relaxed_calls(tools, calling, _TRIAL_SHARE)
        except (SchemaError, GrammarError):
            kept = [
                tool
                if tool.name in calling.strict or self._can_hold(tool, calling)
                else ToolSchema(tool.name)
                for tool in tools
            ]
        with _refusals():
            body, relaxed = self._relaxed_calls(kept, calling)
        is_whole = all(tool in kept for tool in tools)
        return body, relaxed if is_whole else tuple(sorted({*relaxed, ANY_PARAMETERS}))

    def _can_hold(self, tool: ToolSchema, calling: ToolCallConstraint) -> bool:
        try:
            self._relaxed_calls([tool], calling, _TRIAL_SHARE)
        except GrammarTimeoutError:
            if self._budget.left_s < _LEFT_S_MIN:
                raise
            return False
        except (SchemaError, GrammarError):
            return False
        return True

    def _relaxed_calls(
        self, tools: Sequence[ToolSchema], calling: ToolCallConstraint, share: float = 1.0
    ) -> tuple[Any, tuple[str, ...]]:
        """Raises `SchemaError` or `GrammarError`. `share`: of the time that is left."""

        def write(relaxation: Relaxation) -> str:
            return CallsGrammar(self._form, tools, relaxation, calling.strict).required(single=calling.single)

        return compile_relaxed(write, partial(self._budget.compile, share=share))

    def _strict(self, tools: Sequence[ToolSchema], calling: ToolCallConstraint, state: str) -> Grammar:
        with _refusals():
            grammar = CallsGrammar(self._form, _loosened(tools, calling)).behind(single=calling.single)
            return CallGrammar(self._budget.compile(grammar), self._markup, state)

    def _calls(self, tools: Sequence[ToolSchema], calling: ToolCallConstraint) -> Any:
        with _refusals():
            return self._budget.compile(CallsGrammar(self._form, tools).required(single=calling.single))

    def _thought(self, conversation: Conversation, text: str) -> tuple[int, ...]:
        """Return the tokens by which the model itself may begin reasoning.

        Empty if the template does so, thinking is off, or the prompt ends with the end of reasoning.
        """
        tokenizer = self._tokenizer
        if is_harmony(tokenizer):
            if conversation.messages is None or conversation.tools:  # behind it, a call's head would be free
                return ()
            return tuple(tokenizer.encode(HARMONY_THOUGHT, add_special_tokens=False))
        is_off = conversation.options.get("enable_thinking") is False
        is_closed = bool(tokenizer.think_end) and text.rstrip().endswith(str(tokenizer.think_end))
        if conversation.messages is None or not self._thinks_unasked or is_off or is_closed:
            return ()
        return tuple(tokenizer.think_start_tokens)


@contextmanager
def _refusals() -> Iterator[None]:
    """Refuse the request where its tools have schemas that are not supported."""
    try:
        yield
    except SchemaError as error:
        raise _refused(f"The schema {error}.", "tools") from None
    except GrammarTimeoutError:
        raise
    except GrammarError as error:
        message = f"A schema in 'tools' is not supported: {_explained(str(error))}."
        raise _refused(message, "tools") from None


def _loosened(tools: Sequence[ToolSchema], calling: ToolCallConstraint) -> list[ToolSchema]:
    """Drop the schemas of tools that are not strict."""
    return [tool if tool.name in calling.strict else ToolSchema(tool.name) for tool in tools]


def _refused(message: str, param: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, message, param=param)


_KEYWORDS = {
    "oneOf constraints": "'oneOf' is supported only if no value can match two of its schemas",
    "min/maxProperties": "'minProperties' and 'maxProperties' are supported only with required 'properties'",
    "multipleOf": "'multipleOf' has too many digits",
    "patternProperty": "'patternProperties' is supported only if no name can match two patterns",
    "regex": "the regular expression is not supported",
    "Regex": "the regular expression is not supported",
    "registry": "a '$ref' can only refer to a part of the same schema",
    "circular": "this '$ref' refers to itself and has other keywords beside it",
}


def _explained(reason: str) -> str:
    """Return llguidance's message, preceded by an explanation where it does not name the keyword."""
    reason = reason.rstrip(".")[:300]
    said = next((ours for theirs, ours in _KEYWORDS.items() if theirs in reason), None)
    reason = reason.replace("Unimplemented keys: ", "no support for the keywords ")
    return f"{said} ({reason})" if said else reason


def offered(conversation: Conversation) -> list[ToolSchema]:
    """Return the tools that an answer may call."""
    found = []
    for tool in (*(conversation.tools or ()), *conversation.late_tools):
        described = tool.get("function", tool)
        if isinstance(described, Mapping) and isinstance(described.get("name"), str):
            found.append(ToolSchema(described["name"], described.get("parameters")))
    return found


def _names(tokenizer: TokenizerWrapper, vocabulary: Vocabulary, ends: Sequence[int]) -> dict[int, str]:
    """Return the tokens that never represent text: special ones, and added ones that look like markup."""
    special = {*vocabulary.special, *ends}
    names = {token: vocabulary.spell(token).decode(errors="replace") for token in special}
    try:
        added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
    except NotImplementedError:  # Mistral's own tokenizers do not list theirs
        added = {}
    markup = {token: name for token, name in added.items() if name[:1] + name[-1:] in ("<>", "[]")}
    return markup | names


def _edges(tokenizer: TokenizerWrapper, call: str) -> Edges:
    """Return the transitions of the output format, with the markers that begin calls."""
    edges = edges_of(tokenizer)
    for state in HARMONY_HEADS if is_harmony(tokenizer) else (CONTENT,):
        edges.setdefault(state, []).append((call, CALL))
    for state, leaving in tokenizer.response_transitions.items():
        edges.setdefault(state, []).extend((marker, then) for marker, then in leaving if then == CALL)
    return edges


_AS_HERMES = {None, "pythonic", "function_gemma", "gemma4", "json_tools"}
"""Parsers for which calls are written in Hermes's format (`json_tools`), which they accept too."""


_WRITTEN = (
    ("function<｜tool▁sep｜>", "deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁sep｜>", "deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<seed:tool_call>", "qwen3_coder", "<seed:tool_call>", "</seed:tool_call>"),
    ("<TOOLCALL>[", "json_list", "<TOOLCALL>", "</TOOLCALL>"),
    ("<|tool_call|>[", "json_list", "<|tool_call|>", ""),
)
"""Formats without a parser of upstream's: what a template writes in a call, the kind, its markers."""


def _call_form(tokenizer: TokenizerWrapper, template: Render | None, lexicon: GrammarTokenizer) -> CallForm:
    if is_harmony(tokenizer):
        lead = "<|channel|>commentary "
        return CallForm("harmony", HARMONY_CALL, "<|call|>", names=lexicon.names, lead=lead)
    kind, rendered = _kind(tokenizer), rendered_calls(template) if template else ""
    spacing = spacing_in(rendered)
    if kind is None:
        for sign, own, start, end in _WRITTEN:
            if sign in rendered:
                return CallForm(own, start, end, lexicon.names, spacing)
    if kind in _AS_HERMES:
        return CallForm(None, names=lexicon.names, spacing=spacing)
    start, end = str(tokenizer.tool_call_start), str(tokenizer.tool_call_end)
    return CallForm(kind, start, end, lexicon.names, spacing)


def _kind(tokenizer: TokenizerWrapper) -> str | None:
    """Return the name of upstream's tool parser for this model."""
    parser = tokenizer.tool_parser
    return None if parser is None else str(parser.__module__).rpartition(".")[2]
