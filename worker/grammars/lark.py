"""Builders for grammars in llguidance's variant of Lark, and the style of generated JSON. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
"""White space between JSON tokens, at most once: one or two blanks, or a line break and indentation. This
allows pretty-printing; without a bound small models fill their whole answer with line breaks."""

_WRITING = {
    "whitespace_pattern": WHITE_SPACE,
    "coerce_one_of": False,
    # No \\uXXXX: `"\\u0061"` equals `"a"`, which would permit duplicate keys and bypass patterns.
    "json_allowed_escapes": 'nrbtf\\"',
}

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
    """Return a rule for a JSON value; `schema` was checked by `worker.grammars.schema`.

    `lenient`: llguidance ignores, with a warning, keywords that it does not implement.
    """
    spelled = json.dumps({**schema, "x-guidance": _WRITING | {"lenient": lenient}}, ensure_ascii=False)
    return f"%json {spelled}"


def marked(text: str, names: Mapping[str, int]) -> str:
    """Return a rule for a text in which names of special tokens stand for these tokens.

    Line breaks become terminals of their own: the lexer takes the longest possible terminal and does not
    backtrack where two possible texts begin with the same one.
    """
    known = sorted(names, key=len, reverse=True)
    parts = re.split("|".join(["(\n+)", *(f"({re.escape(name)})" for name in known)]), text)
    return " ".join(f"<[{names[part]}]>" if part in names else literal(part) for part in parts if part)
