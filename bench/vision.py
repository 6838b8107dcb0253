"""What images cost those who ask about them, and everybody else.

    python -m bench.vision [--model FOLDER] [--side 1024] [--rounds 3] [--parts gaps rows again]

gaps: four streams of text are under way when a question with four new images of `--side` pixels squared
comes; beside it stands what one image takes alone: where that is more than the target, no gap can be shorter.
rows: eight rows with an image each decode beside eight of text, once all are prefilled, and the same sixteen
questions without images. again: a second question about an image that was asked about before, beside
`mlx_vlm.server` with its prefix cache on. The model is the embedded one, or whatever model that sees is in a
folder.
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
from bench.timing import Work, alternate, compare, median_rate, percentile, print_table, timed
from protocol.conversation import pack
from protocol.messages import Generate
from protocol.parts import Media, Sampling
from worker.contract import Model, Prepared
from worker.pocket import MODEL_PATH

PARTS = ("gaps", "rows", "again")
OURS, RIVAL = "roundhouse", "mlx_vlm.server"
STREAMS, IMAGES = 4, 4
ROWS = 16
STREAM_TOKENS = 1200
CALM_PIECES = 32
SETTLED_TOKENS = 60
"""Of every row, before rates count: the last of them is prefilled by then."""
SLICES, SLICE_TOKENS = 5, 16
"""So many slices a round, of so many tokens of every row."""
TEXT_TOKENS = 60
ROW_SIDE = 256
TILE = 24

Messages = list[dict[str, Any]]


def image(side: int, seed: int) -> bytes:
    """A picture that no other seed has, soft patches of random colours, as a JPEG."""
    tile = Image.frombytes("RGB", (TILE, TILE), random.Random(seed).randbytes(3 * TILE * TILE))
    file = io.BytesIO()
    tile.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def image_url(side: int, seed: int) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(image(side, seed)).decode()}"


def question(text: str, urls: Sequence[str] = ()) -> Messages:
    """What a user says of some images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


# --- gaps --------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """All rounds. Seconds."""

    calm: list[float] = field(default_factory=list)
    troubled: list[float] = field(default_factory=list)
    image: list[float] = field(default_factory=list)
    """To the first text of a question with one image and nobody else there, less that of one without."""


async def watch(server: Server, folder: Path, side: int, seed: int, watched: Watched) -> None:
    """One round."""
    async with client(server) as http:
        seeing = await ask(http, server, question("What is it?", [image_url(side, seed)]), 2)
        blind = await ask(http, server, question(random_text(folder, 4, seed)), 2)
        watched.image.append(seeing.first_piece_s - blind.first_piece_s)
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
        "One image alone: from a question to its first text, prefill and all, less that of one without.",
    )


# --- rows --------------------------------------------------------------------------------------------


def prepared(model: Model, text: str, image: bytes | None, id: str, max_tokens: int) -> Prepared:
    """A question as the loop takes it, whose answer does not end by itself."""
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
    preparer = model.open_preparer(model.facts.context_length)
    return preparer.prepare(request, [] if image is None else [image])


def decoding(model: Model, folder: Path, slices: int, *, seeing: bool) -> Ours:
    """All rows, prefilled; they last for so many slices."""
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
    """In process, where tokens can be counted that are no text. A slice of one side, then of the other, each
    on a model of its own: a busy machine troubles both alike."""
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
        "From when the last is prefilled, in process. The aim: 0.95. Images make prompts longer.",
    )


# --- again -------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """Seconds to the first text of first and second questions about the same images."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    cached_tokens: int | None = None


async def again(server: Server, side: int, seed: int, asked: Asked) -> None:
    """One round: an image that nobody has asked about, and two questions."""
    url = image_url(side, seed)
    async with client(server) as http:
        first = await ask(http, server, question("Which colour is most of it?", [url]), 4)
        second = await ask(http, server, question("How many colours has it?", [url]), 4)
    asked.first.append(first.first_piece_s)
    asked.second.append(second.first_piece_s)
    asked.cached_tokens = second.cached_tokens


def report_again(side: int, results: Mapping[str, Asked]) -> None:
    table = []
    for name, asked in results.items():
        # A rate is of first texts by the second: the second question's over the first's.
        faster = compare([Work(1, each) for each in asked.second], [Work(1, each) for each in asked.first])
        times = (statistics.median(asked.first), statistics.median(asked.second))
        cached = "not said" if asked.cached_tokens is None else str(asked.cached_tokens)
        table.append((name, *(f"{1000 * seconds:,.0f}" for seconds in times), str(faster), cached))
    print_table(
        f"Two questions about one image of {side} x {side}",
        ("server", "first, ms to first text", "second", "first over second", "tokens cached"),
        table,
        "The aim: 5.",
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
    parser.add_argument("--servers", default=RIVAL, help="beside ours, for the second question")
    options = parser.parse_args()
    rivals = [name for name in options.servers.split(",") if name and "again" in options.parts]
    if "rows" in options.parts:
        rows(options.model, options.rounds)
    if {"gaps", "again"} & set(options.parts):
        with servers(options.model, ROWS, [OURS, *rivals], reuse=True) as up:
            asyncio.run(measure(up, options.model, options))


if __name__ == "__main__":
    main()
