"""Compilation of JSON schemas that may be relaxed: held to as far as possible.

`worker.grammars.schema` drops what it knows to be unenforceable, and llguidance is lenient: it ignores, with
a warning, keywords that it does not implement. What it still refuses is dropped wherever it occurs, one
keyword after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

from llguidance import LLMatcher

from protocol.types import StructuredOutput
from worker.grammars.compiler import GrammarError
from worker.grammars.response_formats import ResponseFormatError, grammar_of
from worker.grammars.schema import COUNTS, REFERENCE_SIBLINGS, Relaxation

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


def compile_relaxed(
    form: StructuredOutput, compile: Callable[[str], LLMatcher]
) -> tuple[LLMatcher, tuple[str, ...]]:
    """Compile a response format, and return the keywords of its schema that are not enforced everywhere.

    Raises `ResponseFormatError` or `GrammarError` for what no relaxation makes enforceable: a schema that is
    malformed, too large, or without any valid value.
    """
    dropped: frozenset[str] = frozenset()
    while True:  # ends, because `dropped` grows and is finite
        relaxation = Relaxation(dropped)
        try:
            matcher = compile(grammar_of(form, relaxation))
        except ResponseFormatError as error:
            keyword = error.keyword
            if not keyword or keyword in dropped:
                raise
        except GrammarError as error:
            keyword = _to_drop([str(error)], dropped)
            if not keyword:
                raise
        else:
            warnings = matcher.deep_copy().get_grammar_warnings()
            keyword = _to_drop(warnings, dropped)
            if not keyword:
                return matcher, tuple(sorted(relaxation.keywords.union(_ignored(warnings))))
        dropped |= {keyword}


def _to_drop(messages: Iterable[str], dropped: frozenset[str]) -> str:
    """Return the keyword to drop because of llguidance's messages; empty: none."""
    candidates = (
        keyword
        for message in messages
        for reason, keywords in _REASONS.items()
        if reason in message
        for keyword in keywords
    )
    return next((keyword for keyword in candidates if keyword not in dropped), "")


def _ignored(warnings: Iterable[str]) -> Iterator[str]:
    """Return the keywords that llguidance ignores: `oneOf` as `anyOf`, all others entirely."""
    for warning in warnings:
        if _ONE_OF in warning:
            yield "oneOf"
        for found in _UNIMPLEMENTED.finditer(warning):
            yield from json.loads(found[1])
