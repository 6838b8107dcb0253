"""The scheduler with a simulated engine over thousands of histories: no row is lost and none starves."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from protocol.common.progress import ProgressWatch
from protocol.errors import RequestError
from tests.factories import engine_request
from tests.worker.engines import Embedding, picture
from worker.core.failures import watched
from worker.core.prefill import CHUNK_TOKENS_MIN, PADDING_MAX
from worker.core.prefix.sharing import SHORT_TOKENS_MAX
from worker.core.rows import Chunk, EncodeImage, Group, Phase, Row, SchedulerOutput
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.values import EncodedImage, EngineRequest, ImageInput

SEEDS = 100
"""Number of histories; `python -m tests.worker.core.test_scheduler_simulated 0 10000` runs more."""
STARVED_S_MAX = 90.0
"""Simulated seconds, a few hundred steps, within which every row that should not wait makes progress."""


def drawn(request: EngineRequest, number: int) -> int:
    """Return the n-th token of an answer. It depends only on the request, as the engine guarantees."""
    return 10_000 + 97 * len(request.tokens) + 31 * request.tokens[0] + number


@dataclass
class Account:
    """A request's history, recorded independently of the scheduler."""

    request: EngineRequest
    came_at: float
    answered: list[int] = field(default_factory=list)
    end: str = ""


@dataclass
class Simulation:
    """Requests arrive, are cancelled, fail and expire; the engine checks every order."""

    seed: int
    now: float = 0.0
    cached: dict[str, list[int]] = field(default_factory=dict)
    fed: dict[str, bool] = field(default_factory=dict)
    """Started rows, and whether a step has dispatched a token for them."""
    accounts: dict[str, Account] = field(default_factory=dict)
    preemptions: int = 0
    forks: int = 0
    together: int = 0
    kept: WeakValueDictionary[str, Embedding] = field(default_factory=WeakValueDictionary)
    """Encoded images that the scheduler holds."""
    looks: int = 0
    found: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        chance = self.random
        self.policy = SchedulerConfig(
            rows_max=chance.choice((1, 3, 8)),
            prefill_tokens=chance.choice((4, 64, 500)),
            inter_token_target_s=chance.choice((0.01, 0.1)),
            bytes_max=chance.choice((None, 400, 600, 900)),
            row_bytes=lambda tokens: 20 + tokens,
            image_bytes_max=chance.choice((None, 20, 50)),
        )
        self.speed = chance.choice((1e-5, 1e-4, 1e-3))
        self.failures = chance.choice((0, 0, 0.02))
        self.overhead = chance.choice((1.0, 1.0, 1.3))
        """Ratio of the caches' actual to their estimated size."""
        self.scheduler = Scheduler(self.policy)
        self.watch = ProgressWatch(STARVED_S_MAX)

    # --- events ---

    def history(self) -> None:
        for _ in range(self.random.randint(5, 25)):
            self.happen()
            self.step()
        left = sum(len(account.request.tokens) + 400 for account in self.here())
        while len(self.scheduler):
            left -= 1
            assert left > 0, "some request never ends"
            self.step()
        self.check_end()

    def happen(self) -> None:
        what = self.random.random()
        if what < 0.5:
            for _ in range(self.random.choice((1, 1, 2, 4))):
                self.come()
        elif what < 0.65 and self.scheduler:
            self.leave(self.random.choice([row.id for row in self.scheduler]), "cancelled")

    def come(self) -> None:
        chance = self.random
        known = [account.request for account in self.accounts.values()]
        images: tuple[ImageInput, ...] = ()
        if known and chance.random() < 0.3:
            tokens, images = known[-1].tokens, known[-1].images
        else:
            tokens = (len(known), *range(1, round(10 ** chance.uniform(0, 2.6))))
            images = self.images(len(tokens))
            for each in images:
                tokens = (*tokens[: each.first], *each.keys(), *tokens[each.end :])
        request = engine_request(
            f"r{len(known)}",
            tokens,
            max_tokens=chance.choice((1, 20, 60, 200)),
            priority=chance.choice((0, 0, 0, 1)),
            deadline_s=chance.choice((None, None, None, None, None, 0.5)),
            images=images,
        )
        account = self.accounts[request.id] = Account(request, self.now)
        try:
            self.scheduler.add(request, self.now)
        except RequestError:
            account.end = "refused"
            assert self.policy.bytes_max is not None
            assert self.policy.row_bytes(len(tokens) + 64) > self.policy.bytes_max

    def images(self, tokens: int) -> tuple[ImageInput, ...]:
        """Draw images after the first token, as far as there is room; often none, otherwise from a few."""
        names = self.random.choices("abcdef", k=self.random.choice((0, 0, 1, 3)))
        drawn = (picture(name, 1 + 13 * place, 3 + ord(name) % 7) for place, name in enumerate(names))
        return tuple(each for each in drawn if each.end < tokens)

    def leave(self, id: str, why: str) -> None:
        assert self.scheduler.drop(id) is not None
        assert self.scheduler.drop(id) is None
        self.cached.pop(id, None)
        self.fed.pop(id, None)
        assert self.accounts[id].end == ""
        self.accounts[id].end = why

    def here(self) -> Iterator[Account]:
        return (account for account in self.accounts.values() if not account.end)

    # --- a step ---

    def step(self) -> None:
        for row in self.scheduler.overdue(self.now):
            self.leave(row.id, "late")
        for account in self.here():
            deadline_s = account.request.deadline_s
            assert deadline_s is None or self.now < account.came_at + deadline_s
        if decodes := self.scheduler.decodes:
            self.decode()
        else:
            self.scheduler.on_step_end(self.now, decoded=None)
        waited = [row for row in self.scheduler if row.phase is Phase.WAITING]
        plan = self.scheduler.plan(self.cache_bytes())
        self.check_plan(plan, waited)
        for row in plan.preempted:
            self.preemptions += 1
            self.cached.pop(row.id, None)
            self.fed.pop(row.id, None)
        for group in plan.groups[: self.random.choice((1, 99))]:
            self.prefill(group)
        if plan.to_encode:
            self.look(plan.to_encode)
        if not decodes:
            self.scheduler.on_step_end(self.now, decoded=False)
        has_room = self.scheduler.has_room(self.cache_bytes())
        assert self.watch.check(map(watched, self.scheduler), self.now, has_room=has_room) == []
        if self.random.random() < 0.25:
            self.check()

    def look(self, look: EncodeImage) -> None:
        row, image = look.row, look.image
        assert image.digest not in self.kept
        self.looks += 1
        if self.scheduler.get(row.id) is None:
            return
        self.now += self.random.uniform(0, 0.05)
        if self.random.random() < self.failures:
            self.leave(row.id, "failed")
            return
        embedding = self.kept[image.digest] = Embedding(image.digest, image.nbytes)
        self.scheduler.on_image_encoded(look, EncodedImage(embedding, image.nbytes))
        limit = self.policy.image_bytes_max
        assert limit is None or sum(each.nbytes for each in self.kept.values()) <= limit

    def cache_bytes(self) -> int:
        rows = [len(self.cached[id]) for id in self.cached if self.cached[id]]
        return round(self.overhead * sum(map(self.policy.row_bytes, rows)))

    def decode(self) -> None:
        self.now += 0.002 + 0.0005 * len(self.fed)
        if self.random.random() < self.failures:
            for id in list(self.fed):
                self.leave(id, "failed")
            self.cached = {id: [] for id in self.cached}
            self.scheduler.rewind()
            return
        self.scheduler.on_step_end(self.now, decoded=any(self.fed.values()) or None)
        for id in [id for id, fed in self.fed.items() if fed]:
            account = self.accounts[id]
            row = self.scheduler.get(id)
            assert row is not None
            token = drawn(account.request, len(account.answered))
            account.answered.append(token)
            self.cached[id].append(token)
            fits = self.scheduler.answered(row, token)
            if len(account.answered) == account.request.max_tokens:
                self.leave(id, "done")
            elif not fits:
                self.leave(id, "memory")
        self.fed = dict.fromkeys(self.fed, True)

    def prefill(self, group: Group) -> None:
        if self.random.random() < self.failures:
            for chunk in group:
                self.leave(chunk.row.id, "failed")
            return
        for chunk in group:
            cached = self.cached.setdefault(chunk.row.id, [])
            for each in chunk.row.images:
                if each.first < len(cached) + len(chunk.tokens) and each.end > len(cached):
                    assert each.digest in self.kept
                    assert len(group) == 1
                    self.found += each.first >= len(cached)
            assert chunk.row.tokens[len(cached) :][: len(chunk.tokens)] == chunk.tokens
            cached.extend(chunk.tokens)
            self.now += self.speed * len(chunk.tokens) * (1 + len(cached) / 200) * self.random.uniform(0.5, 2)
        self.scheduler.ran(group)
        for chunk in group:
            if chunk.last:
                self.start(chunk)

    def start(self, chunk: Chunk) -> None:
        for copy in chunk.copies:
            assert not self.cached.get(copy.id)
            assert copy.tokens == chunk.row.tokens
            self.cached[copy.id] = list(self.cached[chunk.row.id])
            self.forks += 1
        for row in (*chunk.copies, chunk.row):
            account = self.accounts[row.id]
            assert row.id not in self.fed
            # Whatever has happened to it, it resumes with the prompt and its whole answer so far.
            assert row.tokens == (*account.request.tokens, *account.answered)
            assert tuple(self.cached[row.id]) == row.tokens[:-1]
            self.cached[row.id].append(row.tokens[-1])
            self.fed[row.id] = False
            self.scheduler.started(row)

    # --- invariants ---

    def check_plan(self, plan: SchedulerOutput, waited: list[Row]) -> None:
        # Some row always makes progress while there are any.
        runs = bool(plan.groups or plan.to_encode)
        assert (self.scheduler.decodes or runs) == bool(len(self.scheduler))
        if plan.to_encode:
            assert plan.to_encode.row.phase is Phase.PREFILL
            assert not any(chunk.tokens for group in plan.groups for chunk in group)
            return
        # All rows fit: rows grow by blocks, and preempt others before they take one.
        assert self.policy.bytes_max is None or self.reserved() <= self.policy.bytes_max
        once = [row.id for group in plan.groups for c in group for row in (c.row, *c.copies)]
        assert len(once) == len(set(once))
        padded = [len(group) * max(len(chunk.tokens) for chunk in group) for group in plan.groups]
        assert sum(padded) <= self.policy.prefill_tokens
        for group, size in zip(plan.groups, padded, strict=True):
            if len(group) > 1:
                self.check_together(group, size)
            assert group[0].row.phase is Phase.PREFILL
            # The first chunk is cut to the budget; chunks with images before them too.
            if not group[0].last and not group[0].row.images:
                assert not any(c.tokens for c in plan.groups[0]) or group is plan.groups[0]
                assert len(group[0].tokens) >= min(CHUNK_TOKENS_MIN, self.policy.prefill_tokens)
        self.check_order(waited)

    def check_together(self, group: Group, size: int) -> None:
        self.together += 1
        assert all(c.row.prefilled == 0 for c in group)
        assert all(c.last for c in group)
        assert max(len(c.tokens) for c in group) <= SHORT_TOKENS_MAX
        assert sum(len(c.tokens) for c in group) > (1 - PADDING_MAX) * size

    def check_order(self, waited: list[Row]) -> None:
        """Check that rows passed over in this plan have a slot and memory in the next one."""
        placed = [row for row in waited if row.phase is Phase.PREFILL]
        if not placed:
            return
        last = max(row.queue_key for row in placed)
        passed_over = [row for row in waited if row.phase is not Phase.PREFILL and row.queue_key < last]
        running = [row for row in self.scheduler if row.phase in (Phase.PREFILL, Phase.DECODE)]
        assert len(running) + len(passed_over) <= self.policy.rows_max
        if self.policy.bytes_max is not None:
            reserved = sum(row.bytes for row in running)
            needed = sum(self.policy.row_bytes(row.length // 64 * 64 + 64) for row in passed_over)
            assert reserved + needed <= self.policy.bytes_max

    def reserved(self) -> int:
        return sum(row.bytes for row in self.scheduler)

    def check(self) -> None:
        rows = list(self.scheduler)
        assert {row.id for row in rows} == {account.request.id for account in self.here()}
        by_phase = {phase: [row for row in rows if row.phase is phase] for phase in Phase}
        assert {phase: len(those) for phase, those in by_phase.items()} == {
            phase: self.scheduler.count(phase) for phase in Phase
        }
        assert len(by_phase[Phase.PREFILL]) + len(by_phase[Phase.DECODE]) <= self.policy.rows_max
        assert {row.id for row in by_phase[Phase.DECODE]} == self.fed.keys()
        for row in by_phase[Phase.WAITING]:
            assert not self.cached.get(row.id)
            assert (row.prefilled, row.bytes) == (0, 0)
        for row in by_phase[Phase.PREFILL]:
            assert row.prefilled == len(self.cached.get(row.id, ()))
        for row in rows:
            assert row.answered == self.accounts[row.id].answered
            assert row.length == len(row.request.tokens) + len(row.answered)
        self.check_bytes([row for row in rows if row.phase is not Phase.WAITING])

    def check_bytes(self, running: list[Row]) -> None:
        if self.policy.bytes_max is None:
            assert self.reserved() == 0
            return
        assert self.reserved() <= self.policy.bytes_max
        for row in running:
            assert row.bytes >= self.policy.row_bytes(row.length)
            assert row.bytes <= self.policy.bytes_max

    def check_end(self) -> None:
        assert not self.cached
        assert not self.fed
        assert self.reserved() == 0
        assert not self.scheduler.plan().groups
        assert self.scheduler.overdue(1e9) == []
        for account in self.accounts.values():
            whole = [drawn(account.request, n) for n in range(account.request.max_tokens)]
            assert account.answered == whole[: len(account.answered)]
            assert account.end
            assert (account.end == "done") == (account.answered == whole)
            if account.end == "memory":
                assert self.policy.bytes_max is not None
                length = len(account.request.tokens) + len(account.answered)
                assert self.policy.row_bytes(length + 64) > self.policy.bytes_max


def play(seeds: Iterable[int]) -> Iterator[Simulation]:
    """Play a history for each seed."""
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            simulation.history()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        yield simulation


def test_in_every_history_the_rules_hold_and_everyone_ends() -> None:
    played = list(play(range(SEEDS)))
    # The histories have everything in them.
    ends = Counter(account.end for simulation in played for account in simulation.accounts.values())
    for end in ("done", "cancelled", "failed", "late", "memory", "refused"):
        assert ends[end] > 5, end
    for event, least in (
        ("preemptions", 25),
        ("forks", 40),
        ("together", 12),
        ("looks", 240),
    ):
        assert sum(getattr(simulation, event) for simulation in played) > least, event
    assert sum(simulation.found for simulation in played) > 1.2 * sum(each.looks for each in played)


if __name__ == "__main__":
    for _ in play(range(int(sys.argv[1]), int(sys.argv[2]))):
        pass
