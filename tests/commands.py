"""Parse command lines of programs within a test, without doing the programs' work."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

import pytest

from worker.process.preload import SWITCH


class Understood(Exception):
    """Raised instead of the program's work, after its command line has been parsed."""


def check_arguments(module: str, arguments: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Assert that the program's parser accepts `arguments`."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: Sequence[str] | None = None) -> argparse.Namespace:
        parse(parser, args)
        raise Understood

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Understood):
        _run(module, arguments, patch)


def _run(module: str, arguments: Sequence[str], patch: pytest.MonkeyPatch) -> None:
    """Run `module` like `python -m`, in this process, which must not re-execute itself with another BLAS."""
    patch.setenv(SWITCH, "off")
    patch.setattr(sys, "argv", [module, *arguments])
    # runpy warns when it runs a module that has already been imported.
    is_package = hasattr(sys.modules.get(module), "__path__")
    patch.delitem(sys.modules, f"{module}.__main__" if is_package else module, raising=False)
    runpy.run_module(module, run_name="__main__", alter_sys=False)
