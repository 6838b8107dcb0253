"""Check that no other module hides one of our packages, whose names are words that other programs use too."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from deploy import __file__ as OURS

EXIT_CONFIGURATION = 78
"""That of `protocol.settings.reader`, which may be hidden."""


def check() -> None:
    """Exit with a message if Python finds another module than ours, as all our processes would."""
    folder = Path(OURS).parents[1]
    for name in ("protocol", "broker", "worker"):
        spec = find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin)
        # A package that can be run takes the place of ours on purpose.
        is_runnable = found is not None and found.with_name("__main__.py").exists()
        if found is None or (found.parents[1] != folder and not is_runnable):
            place = found or (list(spec.submodule_search_locations or ()) if spec else "nothing")
            print(
                f"roundhouse: PYTHONPATH hides the package {name!r} of Roundhouse by {place}: "
                "unset it for this command, or rename that module",
                file=sys.stderr,
            )
            raise SystemExit(EXIT_CONFIGURATION)
