"""Grammars in llguidance's variant of Lark, written piece by piece. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from worker.grammars.schema import spelled

HEAD = '%llguidance {"no_forcing": true}\n'
"""Where only one text may follow, the model still chooses its tokens: else llguidance would, and would have
to ask the tokenizer, which is Python's, from within a mask."""


def grammar(start: str, rules: str = "") -> str:
    """A whole grammar, of what `start` is made of."""
    return f"{HEAD}start: {start}\n{rules}"


def literal(text: str) -> str:
    """This text and no other. Lark's strings are JSON's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex(pattern: str) -> str:
    """A terminal, of a pattern whose slashes are escaped."""
    return f"/{pattern}/"


def escaped(text: str) -> str:
    """For a pattern: this text."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace(r"\ ", " ")


def value(schema: Mapping[str, Any]) -> str:
    """A JSON value; `schema` is one that `worker.grammars.schema` has checked."""
    return f"%json {spelled(schema)}"


def marked(text: str, names: Mapping[str, int]) -> str:
    """A text with the names of special tokens in it, each as that token.

    Line ends stand by themselves: the lexer takes the longest terminal that may come, and would not go back
    where two texts that may follow begin with the same one.
    """
    known = sorted(names, key=len, reverse=True)
    parts = re.split("|".join(["(\n+)", *(f"({re.escape(name)})" for name in known)]), text)
    return " ".join(f"<[{names[part]}]>" if part in names else literal(part) for part in parts if part)
