"""Builders for grammars in llguidance's variant of Lark. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from worker.grammars.schema import spelled

HEAD = '%llguidance {"no_forcing": true}\n'
"""Turns token forcing off: where only one text may follow, the model still chooses its tokens. llguidance
would have to call the tokenizer, in Python, while it computes a mask."""


def grammar(start: str, rules: str = "") -> str:
    """Return a complete grammar. `start`: the body of the start rule."""
    return f"{HEAD}start: {start}\n{rules}"


def literal(text: str) -> str:
    """Return a terminal for exactly this text. Lark strings are JSON strings."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex(pattern: str) -> str:
    """Return a terminal for a pattern whose slashes are escaped."""
    return f"/{pattern}/"


def escaped(text: str) -> str:
    """Escape a text for use in a pattern."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace(r"\ ", " ")


def value(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Return a rule for a JSON value; `schema` was checked by `worker.grammars.schema`. `lenient`: see
    `spelled`."""
    return f"%json {spelled(schema, lenient=lenient)}"


def marked(text: str, names: Mapping[str, int]) -> str:
    """Return a rule for a text in which names of special tokens stand for these tokens.

    Line breaks become terminals of their own: the lexer takes the longest possible terminal and does not
    backtrack where two possible texts begin with the same one.
    """
    known = sorted(names, key=len, reverse=True)
    parts = re.split("|".join(["(\n+)", *(f"({re.escape(name)})" for name in known)]), text)
    return " ".join(f"<[{names[part]}]>" if part in names else literal(part) for part in parts if part)
