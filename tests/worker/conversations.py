"""Random conversations on the tiny models of every architecture with a prefix cache, compared with upstream.

    python -m tests.worker.conversations --seeds 100 --architecture jamba

Turns grow, branch off an earlier one, are cut short or repeated, several at a time, while little memory
causes evictions; with odd seeds rows are drafted for. Whatever is reused, the answer must equal that of
upstream alone without a cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest import mock

from protocol.messages import Finished, Message, StepOutputs
from protocol.types import Delta
from tests.models.fixtures import model_folder
from tests.oracle import Oracle
from tests.worker.engines import Inbox
from tests.worker.zoo import main
from worker.core.commands import Submit
from worker.core.engine_core import EngineCore
from worker.core.prefix import sharing as prefix_sharing
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.store import PrefixStore
from worker.core.publisher import Publisher
from worker.core.rows import Row
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.speculation import Speculation
from worker.interfaces import Model
from worker.values import EngineRequest, SamplingParams

TURNS = 18
"""Default number of turns in a scenario."""
PROMPT_TOKENS_MAX = 130
ANSWER_TOKENS_MAX = 10
GUESSES_MAX = 3
_VOCABULARY = 2000


@dataclass(frozen=True)
class Turn:
    """A request, its answer, and the number of reused tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cached: int
    boundaries: tuple[int, ...]


class RandomDrafts(Speculation):
    """Random drafts for most rows in most steps: hardly a token is accepted, but the rows are verified."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(is_on=False)
        self._rng = rng

    def propose(self, rows: Sequence[Row], _forced_tokens: object = None) -> Mapping[str, Sequence[int]]:
        rooms = {row.id: min(GUESSES_MAX, row.request.max_tokens - len(row.answered) - 2) for row in rows}
        return {
            id: [self._rng.randrange(_VOCABULARY) for _ in range(room)]
            for id, room in rooms.items()
            if room > 0 and self._rng.random() < 0.8
        }


@contextmanager
def small_steps() -> Iterator[None]:
    """Shrink the block and step sizes so that short prompts are split, stored and shared like long ones."""
    with (
        mock.patch.multiple(
            prefix_sharing, REUSED_TOKENS_MIN=2, AWAITED_TOKENS_MIN=8, CUT_NEAR=2, SHORT_TOKENS_MAX=4
        ),
        mock.patch.multiple(prefix_sharing, LONG_TOKENS=64),
        mock.patch.multiple("worker.core.prefix.store", BLOCK_TOKENS=24, KEPT_TOKENS_MIN=16),
    ):
        yield


def converse(model: Model, rng: random.Random, count: int = TURNS, *, drafted: bool = False) -> list[Turn]:
    """Run some conversations, mostly greedy. Sampled turns are not compared."""
    assert model.engine.shape is not None
    inbox, said = Inbox(), list[Message]()
    store = PrefixStore(model.engine, PrefixIndex(model.engine.shape), rng.choice((10**6, 10**9)), inbox.put)
    policy = SchedulerConfig(
        rows_max=rng.randint(1, 5),
        prefill_tokens=rng.choice((16, 64)),
    )
    loop = EngineCore(
        model=model,
        scheduler=Scheduler(policy, store.index),
        inbox=inbox,  # type: ignore[arg-type]
        publisher=Publisher("w", said.append, lambda: 0),
        store=store,
        drafting=RandomDrafts(rng) if drafted else Speculation(),
    )
    known: list[tuple[int, ...]] = [()]
    asked: dict[str, EngineRequest] = {}
    turns: list[Turn] = []
    while len(turns) < count:
        for number in range(rng.randint(1, 4)):
            request = _request(f"{len(asked)}", known, rng, alone=number == 0)
            asked[request.id] = request
            inbox.put(Submit(request))
        loop.run()
        new = [_turn(request, said) for request in asked.values() if request.id in _ended(said)]
        known += [(*turn.prompt, *turn.answer) for turn in new[len(turns) :]]
        turns = new
    assert model.engine.cache_bytes() == 0
    store.clear()
    assert store.index.ram_bytes == 0
    greedy = [request.sampling == SamplingParams() for request in asked.values()]
    return [turn for turn, is_greedy in zip(turns, greedy, strict=True) if is_greedy]


def _request(id: str, known: list[tuple[int, ...]], rng: random.Random, *, alone: bool) -> EngineRequest:
    begun = rng.choice(known[-6:] if alone else known)
    begun = begun[: rng.choice((len(begun), rng.randint(0, len(begun))))]
    more = rng.choice((0, 1, rng.randint(1, 40)))
    tokens = (*begun, *(rng.randrange(_VOCABULARY) for _ in range(more)))[:PROMPT_TOKENS_MAX] or (7,)
    borders = {rng.randint(1, len(tokens)) for _ in range(2)} - {len(tokens)}
    return EngineRequest(
        id=id,
        tokens=tokens,
        sampling=SamplingParams()
        if rng.random() < 0.8
        else SamplingParams(temperature=1.0, seed=rng.getrandbits(40)),
        stop=(),
        max_tokens=rng.randint(1, ANSWER_TOKENS_MAX),
        end_tokens=frozenset(),
        boundaries=tuple(sorted(borders)),
    )


def _ended(said: list[Message]) -> dict[str, Finished]:
    return {message.id: message for message in said if isinstance(message, Finished)}


def _turn(request: EngineRequest, said: list[Message]) -> Turn:
    deltas: list[Delta] = [delta for each in said if isinstance(each, StepOutputs) for delta in each.deltas]
    answer = tuple(token for delta in deltas if delta.id == request.id for token in delta.tokens)
    cached = _ended(said)[request.id].usage.cached_tokens
    return Turn(request.tokens, answer, cached, request.boundaries)


def differences(
    model: Model, architecture: str, seed: int, oracle: Oracle, count: int = TURNS, *, drafted: bool = False
) -> tuple[list[Turn], list[Turn]]:
    """Return all turns of a scenario, and those whose answers differ from upstream's."""
    with small_steps():
        rng = random.Random(f"{architecture} {seed} conversations")
        turns = converse(model, rng, count, drafted=drafted)
    kv = model.info.kv_quantization
    settings = {} if kv is None else {"kv": asdict(kv)}
    requests = [{"tokens": turn.prompt, "max_tokens": len(turn.answer), **settings} for turn in turns]
    oracle.ask(model_folder(architecture), requests)
    answers = [tuple(answer["tokens"]) for answer in oracle.hear()]
    wrong = [turn for turn, answer in zip(turns, answers, strict=True) if turn.answer != answer]
    return turns, wrong


def _check(model: Model, architecture: str, seed: int, oracle: Oracle) -> list[str]:
    if model.engine.shape is None:
        return []  # nothing can be reused
    _, wrong = differences(model, architecture, seed, oracle, drafted=seed % 2 == 1)
    return [str(turn) for turn in wrong]


if __name__ == "__main__":
    raise SystemExit(main("Random conversations, held against upstream alone.", _check))
