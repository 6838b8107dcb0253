"""Cost of images for the requests that contain them, and for all other requests.

    python -m bench.vision [--model FOLDER] [--side 1024] [--rounds 3] [--parts gaps rows again]

gaps: four text streams are running when a request with four new images of `--side` pixels squared arrives.
Next to it stands the time of one image alone: if that exceeds the target, no gap can be shorter. rows: eight
rows with an image each decode beside eight of text, once all are prefilled, compared with the same sixteen
requests without images. again: a second question about the same image, next to `mlx_vlm.server` with its
prefix cache on. The model is the embedded one, or any vision model in a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from PIL import Image

from bench.client import Answer, ask, client
from bench.gaps import gaps
from bench.models import random_text
from bench.ours import Ours, load
from bench.rivals import Server, servers
from bench.timing import Work, alternate, compare, median_rate, print_table, timed
from deploy.load.samples import percentile
from protocol.conversation import pack
from protocol.messages import Generate
from protocol.types import Media, Sampling
from worker.interfaces import Model
from worker.pocket import MODEL_PATH
from worker.values import EngineRequest

PARTS = ("gaps", "rows", "again")
OURS, RIVAL = "roundhouse", "mlx_vlm.server"
STREAMS, IMAGES = 4, 4
ROWS = 16
STREAM_TOKENS = 1200
CALM_PIECES = 32
SETTLED_TOKENS = 60
"""Tokens of every row before rates count; by then the last row is prefilled."""
SLICES, SLICE_TOKENS = 5, 16
"""Slices per round, and tokens of every row in each."""
TEXT_TOKENS = 60
ROW_SIDE = 256
TILE = 24

Messages = list[dict[str, Any]]


def image(side: int, seed: int) -> bytes:
    """Return a JPEG unique to the seed: soft patches of random colours."""
    tile = Image.frombytes("RGB", (TILE, TILE), random.Random(seed).randbytes(3 * TILE * TILE))
    file = io.BytesIO()
    tile.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def image_url(side: int, seed: int) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(image(side, seed)).decode()}"


def question(text: str, urls: Sequence[str] = ()) -> Messages:
    """Return a user's message about some images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


# --- gaps --------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """All rounds. Times are in seconds."""

    calm: list[float] = field(default_factory=list)
    troubled: list[float] = field(default_factory=list)
    image: list[float] = field(default_factory=list)
    """Time to first text of a request with one image and no other load, minus that of one without."""


async def watch(server: Server, folder: Path, side: int, seed: int, watched: Watched) -> None:
    """Run one round."""
    async with client(server) as http:
        seeing = await ask(http, server, question("What is it?", [image_url(side, seed)]), 2)
        blind = await ask(http, server, question(random_text(folder, 4, seed)), 2)
        watched.image.append(seeing.first_s - blind.first_s)
        streams = [Answer(underway_pieces=CALM_PIECES) for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as group:
            for number, stream in enumerate(streams):
                text = random_text(folder, TEXT_TOKENS, seed + number)
                group.create_task(ask(http, server, text, STREAM_TOKENS, stream))
            for stream in streams:
                await stream.underway.wait()
            urls = [image_url(side, seed + number) for number in range(1, 1 + IMAGES)]
            asked = await ask(http, server, question("What are these?", urls), 2)
    joined = max(stream.pieces[CALM_PIECES // 2] for stream in streams)
    for stream in streams:
        before = [at for at in stream.pieces if at <= asked.sent_at]
        watched.calm += gaps(before, joined, asked.sent_at)
        watched.troubled += gaps(stream.pieces, asked.sent_at, asked.pieces[0])


def report_gaps(side: int, watched: Watched) -> None:
    figures = {
        "calm, median": percentile(watched.calm, 50),
        "calm, 99%": percentile(watched.calm, 99),
        "beside the images, median": percentile(watched.troubled, 50),
        "beside the images, 99%": percentile(watched.troubled, 99),
        "beside the images, longest": max(watched.troubled),
        "one image alone, median": statistics.median(watched.image),
    }
    print_table(
        f"Gaps of {STREAMS} streams while {IMAGES} images of {side} x {side} are encoded",
        ("gap", "ms"),
        [(name, f"{1000 * seconds:,.0f}") for name, seconds in figures.items()],
        "One image alone: time to the first text, prefill included, minus that of a request without images.",
    )


# --- rows --------------------------------------------------------------------------------------------


def prepared(model: Model, text: str, image: bytes | None, id: str, max_tokens: int) -> EngineRequest:
    """Return a request for the loop whose answer does not end by itself."""
    parts: list[dict[str, str]] = [{"type": "text", "text": text}]
    media: list[Media] = []
    if image is not None:
        parts.append({"type": "image"})
        media.append(Media(frame=0, mime="image/jpeg", sha256=sha256(image).hexdigest()))
    request = Generate(
        incarnation="bench",
        id=id,
        sampling=Sampling(seed=0, temperature=0.0),
        messages=pack([{"role": "user", "content": parts}]),
        media=media,
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    preparer = model.open_preparer(model.info.context_length)
    return preparer.prepare(request, [] if image is None else [image])


def decoding(model: Model, folder: Path, slices: int, *, seeing: bool) -> Ours:
    """Return a side with all rows prefilled, whose answers last for `slices` slices."""
    texts = [random_text(folder, TEXT_TOKENS, row) for row in range(ROWS)]
    images = [image(ROW_SIDE, row) if seeing and row % 2 else None for row in range(ROWS)]
    max_tokens = 2 * SETTLED_TOKENS + slices * SLICE_TOKENS
    ours = Ours(model, ROWS)
    ours.submit_prepared(
        prepared(model, text, shown, str(row), max_tokens)
        for row, (text, shown) in enumerate(zip(texts, images, strict=True))
    )
    ours.run(ROWS * SETTLED_TOKENS)
    return ours


def rows(folder: Path, rounds: int) -> None:
    """Measure in process, where tokens without text can be counted too. The sides alternate by slices, each
    with its own copy of the model, so noise affects both."""
    slices = SLICES * rounds
    seeing = decoding(load(folder), folder, 2 + slices, seeing=True)
    blind = decoding(load(folder), folder, 2 + slices, seeing=False)
    sides = {
        "with images": lambda: timed(lambda: seeing.run(ROWS * SLICE_TOKENS)),
        "without": lambda: timed(lambda: blind.run(ROWS * SLICE_TOKENS)),
    }
    done = alternate(sides, slices)
    rates = [f"{median_rate(done[name]):,.0f}" for name in sides]
    print_table(
        f"{ROWS} rows that decode, half of them with an image of {ROW_SIDE} x {ROW_SIDE}",
        ("with images, tokens/s", "without", "with over without"),
        [(*rates, str(compare(done["with images"], done["without"])))],
        "In process, after the last prefill. Aim: 0.95. Images make prompts longer.",
    )


# --- again -------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """Seconds to the first text of first and second questions about the same images."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    cached_tokens: int | None = None


async def again(server: Server, side: int, seed: int, asked: Asked) -> None:
    """Run one round: two questions about a new image."""
    url = image_url(side, seed)
    async with client(server) as http:
        first = await ask(http, server, question("Which colour is most of it?", [url]), 4)
        second = await ask(http, server, question("How many colours has it?", [url]), 4)
    asked.first.append(first.first_s)
    asked.second.append(second.first_s)
    asked.cached_tokens = second.cached_tokens


def report_again(side: int, results: Mapping[str, Asked]) -> None:
    table = []
    for name, asked in results.items():
        # Rates are first texts per second; the ratio is the second question's to the first's.
        faster = compare([Work(1, each) for each in asked.second], [Work(1, each) for each in asked.first])
        times = (statistics.median(asked.first), statistics.median(asked.second))
        cached = "not reported" if asked.cached_tokens is None else str(asked.cached_tokens)
        table.append((name, *(f"{1000 * seconds:,.0f}" for seconds in times), str(faster), cached))
    print_table(
        f"Two questions about one image of {side} x {side}",
        ("server", "first, ms to first text", "second", "first over second", "tokens cached"),
        table,
        "Aim: 5.",
    )


async def measure(up: Sequence[Server], folder: Path, options: argparse.Namespace) -> None:
    ours = up[0]
    if "gaps" in options.parts:
        watched = Watched()
        await watch(ours, folder, options.side, 1, Watched())
        for number in range(1, options.rounds + 1):
            await watch(ours, folder, options.side, 10_000 * number, watched)
        report_gaps(options.side, watched)
    if "again" in options.parts:
        results = {server.name: Asked() for server in up}
        for number in range(options.rounds + 1):
            for server in up:
                asked = results[server.name] if number else Asked()
                await again(server, options.side, 7_000_000 + number, asked)
        report_again(options.side, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--servers", default=RIVAL, help="servers to compare for `again`")
    options = parser.parse_args()
    rivals = [name for name in options.servers.split(",") if name and "again" in options.parts]
    if "rows" in options.parts:
        rows(options.model, options.rounds)
    if {"gaps", "again"} & set(options.parts):
        with servers(options.model, ROWS, [OURS, *rivals], reuse=True) as up:
            asyncio.run(measure(up, options.model, options))


if __name__ == "__main__":
    main()
