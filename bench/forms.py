"""Time that a new structured-output schema adds before the first token.

    python -m bench.forms [--rounds 30] [--schema-bytes 4096]

Our complete server, with a model of 151,936 tokens whose own time is negligible. Each round sends one request
without a schema, one with a new schema, and one with the same schema again, which is compiled by then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.client import ask, client
from bench.models import bench_folder
from bench.rivals import Server, servers
from bench.schemas import random_schema, wide_tokenizer_file

QUESTION = "Make something up."
TOKENS = 4
SIDES = ("no schema", "a new schema", "the same again")


def wide_folder(where: Path) -> Path:
    """Write a model whose tokenizer has as many tokens as the model has logits."""
    folder = where / "wide"
    shutil.copytree(bench_folder("wide"), folder)
    (folder / "tokenizer.json").write_text(json.dumps(wide_tokenizer_file()), encoding="utf-8")
    return folder


def new_schema(seed: int, schema_bytes: int) -> dict[str, Any]:
    """Return an object schema of random parts, at least `schema_bytes` long."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < schema_bytes:
        number = len(properties)
        properties[f"part_{number}"] = random_schema(1000 * seed + number)
    return {"type": "object", "properties": properties, "required": list(properties)}


async def first_ms(server: Server, schema: dict[str, Any] | None) -> float:
    """Return the milliseconds from the request to the first text."""
    described = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema}}
    form: dict[str, Any] = {} if schema is None else {"response_format": described}
    async with client(server) as http:
        answer = await ask(http, server, QUESTION, TOKENS, **form)
    return 1e3 * answer.first_s


async def measure(server: Server, rounds: int, schema_bytes: int) -> list[tuple[float, float, float]]:
    """Measure each side in each round; a first round is left out as warm-up."""
    taken = []
    for number in range(rounds + 1):
        schema = new_schema(number, schema_bytes)
        plain = await first_ms(server, None)
        taken.append((plain, await first_ms(server, schema), await first_ms(server, schema)))
    return taken[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--schema-bytes", type=int, default=4096)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bench-forms-") as where,
        servers(wide_folder(Path(where)), 4, ("roundhouse",)) as (server,),
    ):
        taken = asyncio.run(measure(server, options.rounds, options.schema_bytes))
    print("ms to the first text      median      most   median over none")
    plain = [each[0] for each in taken]
    for side, times in zip(SIDES, zip(*taken, strict=True), strict=True):
        over = statistics.median(time - none for time, none in zip(times, plain, strict=True))
        print(f"{side:24}{statistics.median(times):8.1f}  {max(times):8.1f}  {over:+8.1f}")


if __name__ == "__main__":
    main()
