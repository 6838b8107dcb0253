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

from worker.grammars.compiler import GrammarError
from worker.grammars.references import SchemaError
from worker.grammars.schema import OPTION_TYPES, REFERENCE_SIBLINGS, Relaxation

_REASONS = {
    "min/maxProperties": ("maxProperties", "minProperties"),
    "greater than number of properties": ("maxProperties", "minProperties"),
    "patternProperty": ("patternProperties",),
    "regex": ("pattern", "patternProperties"),
    "Regex": ("pattern", "patternProperties"),
    "circular": (OPTION_TYPES, REFERENCE_SIBLINGS, "patternProperties", "allOf"),
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
    dropped: list[str] = []
    while True:  # ends, because `dropped` grows and is finite
        relaxation = Relaxation(frozenset(dropped))
        try:
            matcher = compile(write(relaxation))
            warnings = matcher.deep_copy().get_grammar_warnings()
            more = _to_drop(warnings, dropped)
        except SchemaError as error:
            more = [error.keyword] if error.keyword and error.keyword not in dropped else []
            if not more:
                raise
        except GrammarError as error:
            more = _to_drop([str(error)], dropped)
            if not more:
                raise
        if not more:
            return matcher, tuple(sorted(relaxation.keywords.union(_ignored(warnings))))
        dropped += more


def _to_drop(messages: Iterable[str], dropped: list[str]) -> list[str]:
    """Return the keyword to drop because of llguidance's messages, if any is left."""
    said = "\n".join(messages)
    keywords = (key for reason, keywords in _REASONS.items() if reason in said for key in keywords)
    return [key for key in keywords if key not in dropped][:1]


def _ignored(warnings: Iterable[str]) -> Iterator[str]:
    """Return the keywords that llguidance ignores: `oneOf` as `anyOf`, all others entirely."""
    for warning in warnings:
        if _ONE_OF in warning:
            yield "oneOf"
        for found in _UNIMPLEMENTED.finditer(warning):
            yield from json.loads(found[1])
