"""Run the recipes of docs/clients.md that need third-party packages, unchanged.

Each runs in the environment named after its fence, and passes with status 0 if it has printed something."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.blocks import ROOT, Block, blocks
from tests.conformance.drivers import DRIVERS, Environment
from tests.conformance.environments import INSTALLED, NotMade, make, missing
from tests.conformance.programs import serving

DOCUMENT = ROOT / "docs" / "clients.md"
RECIPE_S_MAX = 300

_JAVASCRIPT = DRIVERS["ai_sdk*.mjs"]
_MADE = {environment.name: environment for environment in DRIVERS.values() if environment != _JAVASCRIPT}
RECIPES: Mapping[str, Environment] = {
    **_MADE,
    "llm": Environment("llm", "python", ("llm==0.36",)),
    **dict.fromkeys(("openai", "anthropic", "ai"), _JAVASCRIPT),
}
"""Environments by the word after a fence."""

OTHERS = ("agents", "open-webui", "services")
"""Recipes that `tests.conformance.agents`, `tests.conformance.loads` and `tests/deploy/units` test; the last
need a service manager or several machines."""

ENVIRONMENTS = (*RECIPES, *OTHERS)


def tried(block: Block, address: str) -> str:
    """Run a block and return its output. Raises `NotMade`, or `SubprocessError` if it failed."""
    environment = RECIPES[block.environment]
    place = make(environment, INSTALLED)
    with tempfile.TemporaryDirectory(dir=place) as name:
        command = _command(block, address, environment, place, Path(name))
        kept = {name: os.environ[name] for name in ("LANG",) if name in os.environ}
        path = os.pathsep.join((str(place / "bin"), os.environ["PATH"]))
        own = {"HOME": name, "PATH": path, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            command,
            cwd=name,
            env={**kept, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RECIPE_S_MAX,
        )
    if done.returncode or not done.stdout.strip():
        raise subprocess.SubprocessError(f"status {done.returncode}\n{done.stdout}{done.stderr[-3000:]}")
    return done.stdout


def _command(
    block: Block, address: str, environment: Environment, place: Path, folder: Path
) -> list[str | Path]:
    if block.language == "bash":
        return ["bash", "-euc", block.at(address)]
    if environment.language == "python":
        return [place / "bin" / "python", "-c", block.at(address)]
    program = folder / "recipe.mjs"
    program.write_text(block.at(address))
    return ["node", program]


def run(wanted: list[str]) -> int:
    """Run the recipes, print a line for each and the count; return the exit status."""
    passed, found = 0, [block for block in blocks(DOCUMENT) if block.environment in wanted]
    with serving() as served:
        for block in found:
            lacking = missing(RECIPES[block.environment])
            try:
                said = "" if lacking else tried(block, served.url.removeprefix("http://"))
            except (NotMade, subprocess.SubprocessError) as error:
                lacking = str(error)
            passed += not lacking
            print(f"FAIL {block.place}: {lacking}" if lacking else f"OK   {block.place}: {said.strip()!r}")
    print(f"{passed}/{len(found)}")
    return 0 if passed == len(found) > 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environments", nargs="*", choices=[*RECIPES, []], help="default: all")
    return run(parser.parse_args().environments or list(RECIPES))


if __name__ == "__main__":
    sys.exit(main())
