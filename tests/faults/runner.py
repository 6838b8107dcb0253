"""Command line of the fault programs: options, the folder of a run, its result, and the exit status."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

WRONG_MAX = 10

Check = Callable[[Path, argparse.Namespace], Sequence[str]]
"""A run in a new folder, with the values of the options. Returns its failures, a text for each."""


def run_program(doc: str | None, check: Check, options: Mapping[str, Any]) -> NoReturn:
    """Parse the command line, print its values, run `check`, print its failures, and exit with 1 if any.

    `options`: the default of each flag, or the arguments of `ArgumentParser.add_argument` for it.
    """
    parser = argparse.ArgumentParser(description=doc)
    for flags, option in options.items():
        told = option if isinstance(option, dict) else {"type": type(option), "default": option}
        parser.add_argument(*flags.split(), **told)
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in vars(given).items()), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        wrong = check(Path(folder), given)
    took_s = time.monotonic() - began
    print(f"{len(wrong)} wrong after {took_s:.0f} s", *wrong[:WRONG_MAX], sep="\n", flush=True)
    raise SystemExit(1 if wrong else 0)
