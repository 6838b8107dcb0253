"""Compilation of JSON schemas that may be relaxed: held to as far as possible.

`worker.grammars.schema` drops what it knows to be unenforceable, and llguidance is lenient: it ignores, with
a warning, keywords that it does not implement. What it still refuses is dropped: patterns that it refuses by
themselves where they are, and other keywords wherever they occur, one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

from llguidance import LLMatcher

from worker.grammars import lark
from worker.grammars.compiler import GrammarError, GrammarTimeoutError
from worker.grammars.references import SchemaError
from worker.grammars.schema import COUNTS, REFERENCE_SIBLINGS, Relaxation, Unenforceable

TRIALS_MAX = 64
"""Maximum number of patterns that are compiled by themselves to find those at fault."""

_PATTERNS = ("pattern", "patternProperties")
_REASONS = {
    "min/maxProperties": COUNTS,
    "patternProperty": ("patternProperties",),
    "regex": _PATTERNS,
    "Regex": _PATTERNS,
    "circular": (REFERENCE_SIBLINGS, "patternProperties", "allOf"),
}
"""What llguidance says, and the keywords to drop for it, in order."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_ONE_OF = "oneOf not fully supported"

Compile = Callable[[str], LLMatcher]


def compile_relaxed(
    write: Callable[[Relaxation], str], compile: Compile
) -> tuple[LLMatcher, tuple[str, ...]]:
    """Compile the grammar that `write` returns for a relaxation of its schemas, and return the keywords that
    are not enforced everywhere.

    Raises `SchemaError` or `GrammarError` for what no relaxation makes enforceable: a schema that is
    malformed, too large, or without any valid value.
    """
    dropped: frozenset[Unenforceable] = frozenset()
    while True:  # ends, because `dropped` grows and is finite
        relaxation = Relaxation(dropped)
        try:
            matcher = compile(write(relaxation))
        except SchemaError as error:
            more = {(error.keyword, "")} if error.keyword else set()
            if more <= dropped:
                raise
        except GrammarError as error:
            more = _to_drop([str(error)], relaxation, compile)
            if not more:
                raise
        else:
            warnings = matcher.deep_copy().get_grammar_warnings()
            more = _to_drop(warnings, relaxation, compile)
            if not more:
                return matcher, tuple(sorted(relaxation.keywords.union(_ignored(warnings))))
        dropped |= more


def _to_drop(messages: Iterable[str], relaxation: Relaxation, compile: Compile) -> set[Unenforceable]:
    """Return what to drop because of llguidance's messages."""
    keywords = dict.fromkeys(
        keyword
        for message in messages
        for reason, keywords in _REASONS.items()
        if reason in message
        for keyword in keywords
    )
    suspects = [suspect for suspect in sorted(relaxation.patterns) if suspect[0] in keywords]
    if len(suspects) <= TRIALS_MAX:
        at_fault = {suspect for suspect in suspects if not _is_supported(suspect, compile)}
        if at_fault - relaxation.dropped:
            return at_fault
    anywhere = ((keyword, "") for keyword in keywords)
    return {*[drop for drop in anywhere if drop not in relaxation.dropped][:1]}


def _is_supported(suspect: Unenforceable, compile: Compile) -> bool:
    """Whether llguidance supports a pattern, or the patterns of an object's names, by themselves."""
    keyword, value = suspect
    schema = {keyword: value if keyword == "pattern" else {name: {} for name in json.loads(value)}}
    try:
        compile(lark.grammar(lark.value(schema)))
    except GrammarTimeoutError:
        raise
    except GrammarError:
        return False
    return True


def _ignored(warnings: Iterable[str]) -> Iterator[str]:
    """Return the keywords that llguidance ignores: `oneOf` as `anyOf`, all others entirely."""
    for warning in warnings:
        if _ONE_OF in warning:
            yield "oneOf"
        for found in _UNIMPLEMENTED.finditer(warning):
            yield from json.loads(found[1])
