"""From a request to the grammar that its answer is held to: its form, its tools, and how the model calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.conversation import Conversation
from protocol.errors import Code, RequestError
from protocol.messages import Generate
from protocol.parts import Calling, Form
from worker.grammars import forms
from worker.grammars.calls import Calls, Tool
from worker.grammars.calls import Form as CallForm
from worker.grammars.compiler import Compiler, GrammarError
from worker.grammars.guide import CALL, CallGrammar, HeldGrammar
from worker.grammars.lexicon import Lexicon
from worker.grammars.reading import Edges, Markup
from worker.grammars.schema import SchemaError
from worker.guides import Grammar
from worker.models.template import Render, opens_thoughts, rendered_calls, spacing_in
from worker.output.channels import CONTENT, REASONING
from worker.output.text import Vocabulary

log = logging.getLogger(__name__)

_TOOL = "tool"
"""Upstream's name for the state in which a call has begun."""


class Held:
    """What of a model is shared by the preparers: its lexicon, and what was compiled. One per model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[Lexicon, Compiler] | None = None

    def open(self, tokenizer: TokenizerWrapper, width: int) -> tuple[Lexicon, Compiler] | None:
        """Made by the first who asks, with the tokenizer of its thread. None: the model has no end token, or
        tokens that llguidance does not take; all else it can do."""
        ends = [token for token in tokenizer.eos_token_ids if token < width]
        with self._lock:
            if self._opened is None and ends:
                self._opened = _opened(tokenizer, width, ends)
            return self._opened


def _opened(tokenizer: TokenizerWrapper, width: int, ends: Sequence[int]) -> tuple[Lexicon, Compiler] | None:
    vocabulary = Vocabulary(tokenizer._tokenizer)
    try:
        lexicon = Lexicon(vocabulary.spell, width, _names(tokenizer, vocabulary, ends), ends)
    except ValueError as error:
        log.warning("answers cannot be held to forms: %s", error)
        return None
    return lexicon, Compiler(lexicon)


class Holder:
    """One per preparer."""

    def __init__(self, tokenizer: TokenizerWrapper, template: Render | None, width: int, held: Held) -> None:
        self._tokenizer = tokenizer
        self._opened = held.open(tokenizer, width)
        if self._opened is None:
            return
        self._lexicon, self._compiler = self._opened
        self._form = _call_form(tokenizer, template, self._lexicon)
        self._markup = Markup(_edges(tokenizer, self._form.start), self._lexicon)
        start = tokenizer.think_start if template else None
        self._thinks_unasked = bool(template and start and not opens_thoughts(template, start))

    def grammar_of(
        self, request: Generate, conversation: Conversation, opening: str | None, text: str
    ) -> Grammar | None:
        """What the answer to the prompt `text` is held to; None: nothing. Raises `RequestError`."""
        form, calling = request.form, request.calling or Calling()
        tools = offered(conversation)
        is_called = bool(tools) and (calling.required or bool(calling.name))
        if form is None and not is_called and not (tools and calling.strict):
            return None
        if self._opened is None:
            message = "An answer cannot be held to a form here: this model's tokens do not allow for it."
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param=form.param if form else "tools")
        state = CONTENT if opening is None else opening
        if is_called:
            return self._required(tools, calling, conversation, state, text)
        if form is None:
            return self._strict(tools, calling, state)
        return self._of_form(form, tools, calling, conversation, state, text)

    def _of_form(
        self,
        form: Form,
        tools: Sequence[Tool],
        calling: Calling,
        conversation: Conversation,
        state: str,
        text: str,
    ) -> Grammar:
        name = form.param or "response_format"
        try:
            grammar = forms.grammar_of(form)
        except forms.FormError as error:
            raise _refused(f"The form in '{name}' {error}.", name) from None
        body = self._compiled(grammar, name, f"'{name}' is not served")
        # With tools, the answer may be calls instead.
        bodies = (body, self._calls(_loosened(tools, calling), calling, "tools")) if tools else (body,)
        return HeldGrammar(
            bodies,
            self._lexicon,
            self._markup,
            state,
            self._thought(conversation, text),
            has_blanks=forms.is_json(form),
            is_text=not tools,
        )

    def _required(
        self, tools: Sequence[Tool], calling: Calling, conversation: Conversation, state: str, text: str
    ) -> Grammar:
        chosen = [tool for tool in tools if calling.name in ("", tool.name)]
        if not chosen:
            raise _refused(
                f"'tool_choice' names the tool '{calling.name}', which is not in 'tools'.", "tool_choice"
            )
        body = self._held_calls(chosen, calling)
        thought = self._thought(conversation, text)
        return HeldGrammar((body,), self._lexicon, self._markup, state, thought, has_blanks=True)

    def _held_calls(self, tools: Sequence[Tool], calling: Calling) -> Any:
        """With the schemas of all tools. One that cannot be held to is any object, unless it must be."""
        try:
            return self._calls(tools, calling, "tools")
        except RequestError:
            kept = [
                tool if tool.name in calling.strict or self._can_hold(tool, calling) else Tool(tool.name)
                for tool in tools
            ]
            return self._calls(kept, calling, "tools")

    def _can_hold(self, tool: Tool, calling: Calling) -> bool:
        try:
            self._calls([tool], calling, "tools")
        except RequestError:
            return False
        return True

    def _strict(self, tools: Sequence[Tool], calling: Calling, state: str) -> Grammar:
        grammar = _written(lambda: Calls(self._form, _loosened(tools, calling)).behind(single=calling.single))
        body = self._compiled(grammar, "tools", "A schema in 'tools' is not served")
        return CallGrammar(body, self._markup, state)

    def _calls(self, tools: Sequence[Tool], calling: Calling, param: str) -> Any:
        grammar = _written(lambda: Calls(self._form, tools).required(single=calling.single))
        return self._compiled(grammar, param, "A schema in 'tools' is not served")

    def _compiled(self, grammar: str, param: str, sentence: str) -> Any:
        try:
            return self._compiler.compile(grammar)
        except GrammarError as error:
            raise _refused(f"{sentence}: {_explained(str(error))}.", param) from None

    def _thought(self, conversation: Conversation, text: str) -> tuple[int, ...]:
        """The tokens by which the model may begin a thought itself: unless that is the template's to do,
        thinking is switched off, or the prompt has an empty thought already."""
        tokenizer = self._tokenizer
        is_off = conversation.options.get("enable_thinking") is False
        is_closed = bool(tokenizer.think_end) and text.rstrip().endswith(str(tokenizer.think_end))
        if conversation.messages is None or not self._thinks_unasked or is_off or is_closed:
            return ()
        return tuple(tokenizer.think_start_tokens)


def _written(write: Any) -> str:
    try:
        return str(write())
    except SchemaError as error:
        raise _refused(f"The schema {error}.", "tools") from None


def _loosened(tools: Sequence[Tool], calling: Calling) -> list[Tool]:
    """With the schemas of those tools alone that ask for it."""
    return [tool if tool.name in calling.strict else Tool(tool.name) for tool in tools]


def _refused(message: str, param: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, message, param=param)


_KEYWORDS = {
    "oneOf constraints": "'oneOf' is served only where no value can fit two of its schemas",
    "min/maxProperties": "'minProperties' and 'maxProperties' are served only beside required 'properties'",
    "multipleOf": "'multipleOf' has too many digits",
    "Unknown format": "this 'format' is not known",
    "patternProperty": "'patternProperties' are served only where no name fits two patterns",
    "regex": "the regular expression is not served",
    "Regex": "the regular expression is not served",
    "circular": "this '$ref' refers to itself, with other keywords beside it",
}


def _explained(reason: str) -> str:
    """llguidance's words, and ours before them where they do not say which keyword it is."""
    reason = reason.rstrip(".")[:300]
    said = next((ours for theirs, ours in _KEYWORDS.items() if theirs in reason), None)
    reason = reason.replace("Unimplemented keys: ", "no support for the keywords ")
    return f"{said} ({reason})" if said else reason


def offered(conversation: Conversation) -> list[Tool]:
    """The tools that an answer may call."""
    found = []
    for tool in conversation.tools or ():
        described = tool.get("function", tool)
        if isinstance(described, Mapping) and isinstance(described.get("name"), str):
            found.append(Tool(described["name"], described.get("parameters")))
    return found


def _names(tokenizer: TokenizerWrapper, vocabulary: Vocabulary, ends: Sequence[int]) -> dict[int, str]:
    """The tokens that never stand for text: special ones, and those that look like markup."""
    special = {*vocabulary.special, *ends}
    names = {token: vocabulary.spell(token).decode(errors="replace") for token in special}
    try:
        added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items()}
    except NotImplementedError:  # Mistral's own tokenizers do not tell theirs
        added = {}
    markup = {token: name for token, name in added.items() if name[:1] + name[-1:] in ("<>", "[]")}
    return markup | names


def _edges(tokenizer: TokenizerWrapper, call: str) -> Edges:
    """As `worker.models.format` has them, and where calls begin."""
    edges: dict[str, list[tuple[str, str]]] = {CONTENT: [(call, CALL)]}
    for state, leaving in tokenizer.response_transitions.items():
        known = edges.setdefault(state, [])
        known += [(marker, CALL if then == _TOOL else then) for marker, then in leaving]
    if tokenizer.has_thinking:
        edges[CONTENT].append((str(tokenizer.think_start), REASONING))
        edges.setdefault(REASONING, []).append((str(tokenizer.think_end), CONTENT))
    return edges


_AS_HERMES = {None, "pythonic", "function_gemma", "gemma4", "json_tools"}
"""Forms of calls that are written as Hermes's, which is `json_tools`: parsers know it beside their own."""


def _call_form(tokenizer: TokenizerWrapper, template: Render | None, lexicon: Lexicon) -> CallForm:
    kind = _kind(tokenizer)
    spacing = spacing_in(rendered_calls(template) if template else "")
    if kind in _AS_HERMES:
        return CallForm(None, names=lexicon.names, spacing=spacing)
    start, end = str(tokenizer.tool_call_start), str(tokenizer.tool_call_end)
    return CallForm(kind, start, end, lexicon.names, spacing)


def _kind(tokenizer: TokenizerWrapper) -> str | None:
    """The name of upstream's parser for this model's calls."""
    parser = tokenizer.tool_parser
    return None if parser is None else str(parser.__module__).rpartition(".")[2]
