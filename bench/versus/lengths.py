"""Chats of unequal length, which come together, decode together, or come one at a time.

Prompts are about real text, the same on every side and new in every round.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.client import Answer, ask, burst, client
from bench.rivals import Server
from bench.versus.chats import prompts
from bench.versus.fleet import fleet
from bench.versus.results import Entry
from bench.versus.turns import Figure, Task, Values, entries, within

TOGETHER, DECODE, ALONE = LINES = "together", "decode", "alone"
COMING, COMING_WORDS, COMING_TOKENS = 6, (40, 320), 64
"""Requests that come together, words of their texts (about 100 to 700 tokens), tokens of an answer."""
DECODING, DECODING_WORDS, DECODING_TOKENS = 8, (4, 690), 96
"""Likewise of the requests that decode together, of about 30 to 1,500 tokens."""
ALONE_TOKENS = (16, 48, 128, 512)
TEMPLATE_TOKENS = 14
"""Tokens of SmolLM2's template with an empty system prompt."""
REPEATS = 5
PIECES_MIN = 16
"""Minimum pieces of each answer while all decode."""
ROWS_MAX = 16
FIGURES = {
    TOGETHER: [
        Figure("first", "first text, median", "ms", "less", COMING),
        Figure("done", "time to the end of an answer, mean", "ms", "less", COMING),
        Figure("longest", "longest gap between pieces", "ms", "less", COMING),
    ],
    DECODE: [Figure("rate", "pieces/s while all decode", "", "more", DECODING)],
    ALONE: [
        Figure(f"first{tokens}", f"first text of a prompt of {tokens} tokens", "ms", "less")
        for tokens in ALONE_TOKENS
    ],
}


def measure(line: str, task: Task) -> Iterator[list[Entry]]:
    """Measure one of the lines."""
    with fleet(task.folder, task.names, ROWS_MAX) as up:

        def turn(server: Server, round: int) -> Values:
            return within(_TURNS[line](server, task.folder, round))

        yield entries(task.model, line, FIGURES[line], up.take_turns(turn, task.rounds), task.run)


async def _answers(server: Server, count: int, round: int, words: tuple[int, int], most: int) -> list[Answer]:
    """Send `count` requests at once; answers end where the model ends them, and at `most` tokens."""
    own = {"ignore_eos": False} if "ignore_eos" in server.fields else {}
    _, answers = await burst(server, prompts(count, 7000 + 50 * round, *words), count, most, **own)
    return answers


async def _together(server: Server, folder: Path, round: int) -> Values:
    answers = await _answers(server, COMING, round, COMING_WORDS, COMING_TOKENS)
    gaps = [after - before for answer in answers for before, after in itertools.pairwise(answer.pieces)]
    return {
        "first": 1000 * statistics.median(answer.pieces[0] - answer.sent_at for answer in answers),
        "done": 1000 * statistics.mean(answer.pieces[-1] - answer.sent_at for answer in answers),
        "longest": 1000 * max(gaps),
    }


async def _decode(server: Server, folder: Path, round: int) -> Values:
    answers = await _answers(server, DECODING, round, DECODING_WORDS, DECODING_TOKENS)
    return {"rate": rate_of_all([answer.pieces for answer in answers])}


def rate_of_all(pieces: Sequence[Sequence[float]]) -> float:
    """Return the pieces per second between the last first piece and the first last one. Raises
    `RuntimeError` if that is too short a time."""
    began, ended = max(times[0] for times in pieces), min(times[-1] for times in pieces)
    counts = [sum(began < at <= ended for at in times) for times in pieces]
    if min(counts) < PIECES_MIN:
        raise RuntimeError(f"an answer has only {min(counts)} pieces while all decode")
    return sum(counts) / (ended - began)


async def _alone(server: Server, folder: Path, round: int) -> Values:
    found: dict[str, float] = {}
    async with client(server) as http:
        for place, tokens in enumerate(ALONE_TOKENS):
            texts = _texts_of(folder, tokens - TEMPLATE_TOKENS, 100 * round + 10 * place)
            answers = [
                await ask(http, server, [_SILENT, {"role": "user", "content": text}], 4) for text in texts
            ]
            found[f"first{tokens}"] = 1000 * statistics.median(
                each.pieces[0] - each.sent_at for each in answers
            )
    return found


_SILENT = {"role": "system", "content": ""}
"""Takes the place of the system prompt that the template would add."""
_TURNS: dict[str, Callable[[Server, Path, int], Coroutine[None, None, Values]]] = {
    TOGETHER: _together,
    DECODE: _decode,
    ALONE: _alone,
}


def _texts_of(folder: Path, tokens: int, first: int) -> Iterator[str]:
    """Yield texts of `tokens` tokens. `first`: number of the first one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number in range(first, first + REPEATS):
        _, text = prompts(1, number, tokens, tokens)[0].split("\n\n", 1)
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        yield text[: offsets[tokens - 1][1]]
