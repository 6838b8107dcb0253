"""Random schemas sent to a running server: every complete answer must be valid by its schema.

    python -m tests.worker.grammars.endpoint [--url http://127.0.0.1:8000/v1] [--model NAME] [--schemas 300]
        [--seed 0] [--streams 8] [--max-tokens 600] [--key KEY]

Temperature 1. Prints invalid answers with their numbers, and how many answers were complete, truncated or
refused. Exits with 1 if any was invalid or failed. The schemas are determined by `--seed`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import hypothesis
import jsonschema

from tests.worker.grammars.schemas import Schema, schemas

REQUEST_S_MAX = 600.0


def made_up(count: int, seed: int) -> list[Schema]:
    """Return `count` schemas, deterministic in `seed`."""
    found: list[Schema] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(schemas())
    def collect(schema: Schema) -> None:
        found.append(schema)

    collect()
    return found[:count]


def ask(client: httpx.Client, options: argparse.Namespace, number: int, schema: Schema) -> str:
    """Return the outcome: `ended`, `cut`, `refused`, `invalid` or `failed`."""
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": "Make something up."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "made_up", "schema": schema}},
        "temperature": 1,
        "seed": number,
        "max_tokens": options.max_tokens,
    }
    answer = client.post("/chat/completions", json=body)
    if answer.status_code != 200:
        print(f"{number}: {answer.status_code} {answer.text[:300]}\n  {json.dumps(schema)}")
        return "refused" if answer.status_code == 400 else "failed"
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut"
    content = choice["message"]["content"]
    try:
        jsonschema.validate(json.loads(content), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{number}: {str(error).splitlines()[0]}\n  {content!r}\n  {json.dumps(schema)}")
        return "invalid"
    return "ended"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first one served")
    parser.add_argument("--key", default="none")
    for name, default in (("schemas", 300), ("seed", 0), ("streams", 8), ("max-tokens", 600)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.key}"}
    with httpx.Client(base_url=options.url, headers=headers, timeout=REQUEST_S_MAX) as client:
        models: list[dict[str, Any]] = client.get("/models").raise_for_status().json()["data"]
        options.model = options.model or models[0]["id"]
        asked = made_up(options.schemas, options.seed)
        with ThreadPoolExecutor(options.streams) as pool:
            ways = Counter(pool.map(partial(ask, client, options), range(len(asked)), asked))
    print(f"{options.model}: " + ", ".join(f"{count} {way}" for way, count in sorted(ways.items())))
    return 1 if ways["invalid"] or ways["failed"] or ways["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
