"""Probe every family and write what their rows can do, as `make zoo` does: `python -m tests.capabilities`.
With names of models it prints their lines.

Left out are families whose verdict hangs on numbers: on logits of random weights, or a length too far to be
probed. Each of their models is probed for itself."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import msgspec

from protocol.common.model_folder import POCKET
from tests.models import whole_families
from tests.models.configs import CONFIGS
from tests.models.families import PREFIX, REFUSED, listed
from tests.models.fixtures import model_folder
from tests.models.vision_models import EYES
from tests.models.zoo import ZOO
from worker.load.capabilities import (
    LIBRARIES,
    TABLE,
    CapabilityTable,
    FamilyVerdict,
    device_kind,
    parts_of,
    stage_for,
)
from worker.load.config import in_mlx_lm, read_config
from worker.load.vlm_text import like, load_network, try_text
from worker.load.weights import Open, open_text
from worker.pocket import MODEL_PATH
from worker.process.preload import preload_openblas
from worker.runner.kv.capability_probe import probe_capabilities

_UPSTREAM = ("mlx_lm.models", "mlx_vlm.models")
_BY_DEVICE = {"metal_kernel", "is_available", "default_device"}
_COMPILED = "_gc_func"
"""What `mx.compile` returns, which shows nothing of its function."""
_BY_NUMBERS = ("logits change by", "too far to be probed")
"""Words of reasons that hang on a model's numbers."""


def is_numeric(reason: str) -> bool:
    """Return whether a reason hangs on a model's numbers."""
    return any(words in reason for words in _BY_NUMBERS)


def models() -> list[str]:
    """Return the names of all models that are probed; families that are served, and more kinds of some."""
    whole = [name for name in whole_families.listed() if name not in whole_families.REFUSED]
    families = [name for name in listed() if name not in REFUSED]
    return [*(PREFIX + name for name in (*families, *whole)), *CONFIGS, *ZOO, *EYES, POCKET]


def probe(model: str) -> FamilyVerdict:
    """Return a model's line of the table, whatever its reasons."""
    folder = MODEL_PATH if model == POCKET else model_folder(model)
    network, open_network = _opened(folder, sees=model in (*EYES, POCKET))
    found = probe_capabilities(stage_for(folder, network, open_network))
    lacks = tuple(name for name, value in asdict(found).items() if value is False)
    parts = parts_of(network)
    return FamilyVerdict(tuple(sorted(parts)), lacks, found.reasons, has_kernels(network))


def _opened(folder: Path, *, sees: bool) -> tuple[Any, Open]:
    """Return a network as the loader opens it, and what opens it again. `sees`: with image input."""
    if not sees and in_mlx_lm(read_config(folder, folder.name)):
        return open_text(folder), open_text
    network: Any = load_network(folder)
    if sees:
        return network, load_network
    try_text(network)
    return network, like(network)


def has_kernels(network: Any) -> bool:
    """Return whether what a network's modules run, as far as it is upstream's, chooses by the device or
    refers to a kernel."""
    whole = getattr(network, "whole", None)
    modules = (network if whole is None else whole.language_model).modules()
    waiting: list[Any] = [kind for module in modules for kind in type(module).__mro__]
    seen: set[int] = set()
    while waiting:
        part = inspect.unwrap(waiting.pop())
        if id(part) in seen or not str(getattr(part, "__module__", "")).startswith(_UPSTREAM):
            continue
        seen.add(id(part))
        if inspect.isclass(part):
            waiting += [each for each in vars(part).values() if inspect.isroutine(each)]
        elif isinstance(part, FunctionType):
            names = set(_names(part.__code__))
            used = names & set(part.__globals__)
            if names & _BY_DEVICE or any(re.search("kernel|metal", name.lower()) for name in used):
                return True
            waiting += [part.__globals__[name] for name in used]
        elif type(part).__name__ == _COMPILED and "metal_kernel" in inspect.getsource(
            sys.modules[part.__module__]
        ):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function refers to, with those of its inner ones."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def probed(names: list[str]) -> Iterator[tuple[str, FamilyVerdict]]:
    for name in names:
        try:
            yield name.removeprefix(PREFIX), probe(name)
        except Exception as error:  # no line: the zoo's own check says what is wrong
            print(f"{name}: {error!r}", file=sys.stderr)


def _is_covered(family: FamilyVerdict, other: FamilyVerdict) -> bool:
    """Return whether the line of `other` says the same of a family."""
    return set(family.parts) <= set(other.parts) and family.lacks == other.lacks


def written(table: CapabilityTable) -> str:
    """Return the table as JSON, a line for each family."""
    lines = [
        f"  {json.dumps(name)}: {msgspec.json.encode(family).decode()}"
        for name, family in sorted(table.families.items())
    ]
    versions = json.dumps(table.versions, sort_keys=True)
    body = ",\n".join(lines)
    return f'{{"versions": {versions},\n "device": "{table.device}",\n "families": {{\n{body}\n}}}}\n'


def write() -> None:
    """Probe all models and write the table."""
    lines: dict[str, FamilyVerdict] = {}
    for name, family in probed(models()):
        print(name, *family.reasons, sep=", ", flush=True)
        if any(map(is_numeric, family.reasons)):
            continue
        if not any(_is_covered(family, other) for other in lines.values()) or PREFIX + name in models():
            lines.setdefault(name, family)
    versions = {name: metadata.version(name) for name in LIBRARIES}
    TABLE.write_text(written(CapabilityTable(versions, device_kind(), lines)), encoding="utf-8")
    print(f"{len(lines)} of {len(models())} models are in {Path(TABLE).name}")


def main() -> None:
    preload_openblas(sys.argv)
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(prog="python -m tests.capabilities", description=__doc__)
    parser.add_argument("models", nargs="*", help="default: all, and the table is written")
    if asked := parser.parse_args().models:
        for name, family in probed(asked):
            print(name, msgspec.json.encode(family).decode())
    else:
        write()


if __name__ == "__main__":
    main()
