"""A scripted model for the loop: it keeps to the contract of `Engine` and notes every breach of it."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Events, Failed, Finished, Message
from protocol.parts import Capabilities, Delta
from worker.contract import (
    NO_TARGETS,
    Cut,
    Draw,
    Facts,
    Growth,
    Likelihood,
    Model,
    Piece,
    Pipeline,
    Prepared,
    Preparer,
    Shape,
    Step,
    Targets,
)
from worker.drafts import NO_DRAFTS, Drafter, Weigher
from worker.guides import Foreseen
from worker.pictures import MEDIA_KEYS, Blob, Picture
from worker.prefixes.index import PrefixIndex
from worker.schedule.admission import AdmissionWindow
from worker.schedule.commands import Command, Drop, Stop, Submit
from worker.schedule.failures import PROBE
from worker.schedule.loop import Loop
from worker.schedule.publisher import Publisher
from worker.schedule.scheduler import Policy, Scheduler
from worker.schedule.store import Store

END = 0
INCARNATION = "worker-1"

Image = tuple[str, int, int]
"""A name, which makes its digest, where it stands in the prompt, and how many tokens it has, a byte each."""


def picture(name: str, first: int, tokens: int) -> Picture:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Picture(digest, first, (7,) * tokens, {}, nbytes=tokens)


class Broken(Exception):
    """What the script says fails."""


@dataclass
class Decoding:
    """A started row. `first`, `number`: of its first and its next token, which a step sets out to draw."""

    first: int
    number: int
    draw: Draw
    fed: bool = False


@dataclass
class ScriptedEngine:
    """Draws the tokens of each row's script, then `END` for ever.

    `at` holds what happens at a call, by its number counted from 0: the n-th step, prefill, fork or start of
    all but the harmless prompt's, which fails if `broken`. A token takes one byte.
    """

    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scripts: dict[str, Sequence[int]] = field(default_factory=dict)
    at: dict[tuple[str, int], Callable[[], None]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    prefilled: dict[str, list[int]] = field(default_factory=dict)
    decoding: dict[str, Decoding] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    forks: list[tuple[str, str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Tokens of each prefill."""
    takes: Callable[[str, int], None] = lambda kind, size: None
    """Lets time pass for a step with so many rows, or a prefill of so many tokens."""
    shape: Shape | None = None
    drafter: Drafter | None = None
    weigher: Weigher | None = None
    can_leave_out: bool = False
    restored: dict[str, int] = field(default_factory=dict)
    """How many tokens each row was last restored with."""
    scored: dict[str, list[int]] = field(default_factory=dict)
    """The tokens whose likelihoods were computed for each row."""
    breaches: list[str] = field(default_factory=list)
    ill: dict[str, int] = field(default_factory=dict)
    """After how many tokens a row's grammar fails."""
    broken: bool = False
    looks: list[str] = field(default_factory=list)
    """The digests that were encoded, in order."""
    kept: dict[str, int] = field(default_factory=dict)
    shown: dict[str, tuple[Picture, ...]] = field(default_factory=dict)
    swells: float = 1.0
    """What is kept of an image, by what was estimated."""
    probes: int = 0
    resets: int = 0

    def _call(self, kind: str) -> None:
        number = self.calls[kind] = self.calls.get(kind, -1) + 1
        self.at.get((kind, number), lambda: None)()

    def _whole(self, row: str) -> tuple[int, ...]:
        return (*self.prompts[row], *self.scripts.get(row, ()))

    def look(self, picture: Picture) -> int:
        if picture.digest in self.kept:
            self.breaches.append(f"{picture.digest} is encoded twice")
        self.takes("look", len(picture.tokens))
        self._call("look")
        self.looks.append(picture.digest)
        self.kept[picture.digest] = round(self.swells * picture.nbytes)
        return self.kept[picture.digest]

    def forget(self, digest: str) -> None:
        if digest not in self.kept:
            self.breaches.append(f"{digest} is forgotten, and was not kept")
        self.kept.pop(digest, None)

    def show(self, row: str, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        self._call("show")
        if self.prefilled.get(row) or row in self.decoding:
            self.breaches.append(f"{row} is shown images when it has begun")
        if tuple(tokens) != self._whole(row)[: len(tokens)]:
            self.breaches.append(f"{row} is shown images in {tokens}")
        self.shown[row] = tuple(pictures)

    def _check_images(self, row: str, begin: int, tokens: Sequence[int], *, alone: bool) -> None:
        """What is run or restored of a row is known to have its images, and what is run, to be kept."""
        if all(token < MEDIA_KEYS for token in self.prompts[row]):
            return
        if row not in self.shown or not alone:
            self.breaches.append(f"{row} is run with others, or its images were not shown")
        for picture in self.shown.get(row, ()):
            if (
                picture.first < begin + len(tokens)
                and picture.end > begin
                and picture.digest not in self.kept
            ):
                self.breaches.append(f"{row} is run at {begin} without its image")

    def prefill(
        self, chunks: Mapping[str, Sequence[int]], targets: Mapping[str, Targets] = NO_TARGETS
    ) -> Mapping[str, Sequence[Likelihood]]:
        if PROBE in chunks:
            self.probes += 1
            self.prefilled[PROBE] = [0]
            if self.broken:
                raise Broken("all of it")
            return {}
        stands = {(len(self.prefilled.get(row, ())), len(tokens)) for row, tokens in chunks.items()}
        for row, tokens in chunks.items():
            cached = self.prefilled.setdefault(row, [])
            if row in self.decoding:
                self.breaches.append(f"{row} is prefilled after its start")
            if cached and len(stands) > 1:
                self.breaches.append(f"{row} is run half way with others that stand elsewhere")
            if not tokens or tuple(tokens) != self._whole(row)[len(cached) : len(cached) + len(tokens)]:
                self.breaches.append(f"{row} at {len(cached)} is given {tokens}")
            self._check_images(row, len(cached), tokens, alone=len(chunks) == 1)
        self.groups.append(list(chunks))
        self.sizes.append(sum(map(len, chunks.values())))
        self.takes("prefill", self.sizes[-1])
        try:
            self._call("prefill")
        except Broken:
            for row in chunks:
                # Whoever goes on with a lost cache is noticed at the next chunk or at the start.
                self.prefilled[row] = [-1]
            raise
        for row, tokens in chunks.items():
            self.prefilled[row].extend(tokens)
        return {row: self._score(row, asked) for row, asked in targets.items()}

    def _score(self, row: str, asked: Targets) -> list[Likelihood]:
        """A token's is its id, negative: so it is known which ones were told."""
        whole, end = self._whole(row), len(self.prefilled[row]) + 1
        if asked.tokens != whole[end - len(asked.tokens) : end]:
            self.breaches.append(f"{row} is asked for {asked.tokens} at {end}")
        self.scored.setdefault(row, []).extend(asked.tokens)
        return [Likelihood(-float(token), ((token, -float(token)),) * asked.top) for token in asked.tokens]

    def fork(self, row: str, copy: str) -> None:
        self._call("fork")
        if row in self.decoding or copy in self.prefilled or copy in self.decoding:
            self.breaches.append(f"{copy} is made of {row} at the wrong time")
        self.forks.append((row, copy))
        self.prefilled[copy] = list(self.prefilled[row])
        if row in self.shown:
            self.shown[copy] = self.shown[row]

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        if row == PROBE:
            return
        self._call("start")
        cached = tuple(self.prefilled.get(row, ()))
        if cached != tuple(tokens[:-1]) or tuple(tokens) != self._whole(row)[: len(tokens)]:
            self.breaches.append(f"{row} starts with {cached} cached and {tokens}")
        if prompt_tokens != len(self.prompts[row]) or len(tokens) < prompt_tokens:
            self.breaches.append(f"{row} starts behind {prompt_tokens} tokens of prompt")
        if row in self.decoding:
            self.breaches.append(f"{row} starts twice")
        number = len(tokens) - prompt_tokens
        self.decoding[row] = Decoding(number, number, draw)

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        fed = self._fed(row)
        if runs and runs[-1][1] != len(fed):
            self.breaches.append(f"{row} has {len(fed)} tokens and is stored up to {runs[-1][1]}")
        cuts = [Cut(fed[first:last], last - first, whole_from=first) for first, last in runs]
        return cuts, Cut(fed, 1) if states else None

    def _fed(self, row: str) -> tuple[int, ...]:
        """The tokens that a row's caches stand for."""
        if row not in self.decoding:
            return tuple(self.prefilled[row])
        state = self.decoding[row]
        answered = [*self.scripts.get(row, ()), *[END] * state.number][: state.number]
        return (*self.prompts[row], *answered)[: None if state.fed else -1]

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        if row in self.prefilled or row in self.decoding:
            self.breaches.append(f"{row} is restored over what it has")
        self._check_images(row, 0, (), alone=True)
        cached: list[int] = []
        for piece in pieces:
            assert isinstance(piece.payload, tuple)
            if piece.first != len(cached) or piece.count > piece.last - piece.first:
                self.breaches.append(f"{row} is restored with a gap at {len(cached)}")
            cached += piece.payload[: piece.count]
        if self.shape and self.shape.has_states and states != tuple(cached):
            self.breaches.append(f"{row} is given the states {states} at {cached}")
        if tuple(cached) != self._whole(row)[: len(cached)]:
            self.breaches.append(f"{row} is restored with {cached}")
        self.restored[row] = len(cached)
        self.prefilled[row] = cached

    def pack(self, payload: object) -> tuple[dict[str, Blob], Any]:
        assert isinstance(payload, tuple)
        return {}, list(payload)

    def unpack(self, blobs: Mapping[str, Blob], rest: Any) -> Cut:
        return Cut(tuple(rest), len(rest))

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> Step:
        if not self.decoding:
            self.breaches.append("a step with no row")
        self._call("step")
        self.takes("step", sum(state.fed for state in self.decoding.values()))
        drawn = {}
        failed = {row: Broken("the grammar") for row in self.decoding if self._is_ill(row)}
        for row, state in self.decoding.items():
            if state.fed and row not in failed:
                script = self.scripts.get(row, ())
                drawn[row] = script[state.number] if state.number < len(script) else END
                state.number += 1
            state.fed = True
        asking = [row for row in drawn if self.decoding[row].draw.logprobs is not None]
        likelihoods = {row: Likelihood(-0.25, ((drawn[row], -0.25), (9, -2.0))) for row in asking}
        return Step(drawn, likelihoods, failed)

    def foresee(self, row: str, most: int) -> Foreseen:
        if row not in self.decoding:
            self.breaches.append(f"{row} is not started, and asked how it goes on")
        return Foreseen()

    def _is_ill(self, row: str) -> bool:
        state = self.decoding[row]
        return state.fed and row in self.ill and state.number >= self.ill[row]

    def drop(self, row: str) -> None:
        self.prefilled.pop(row, None)
        self.decoding.pop(row, None)
        self.shown.pop(row, None)

    def reset(self) -> None:
        self.resets += 1
        self.prefilled.clear()
        self.decoding.clear()
        self.shown.clear()

    def cache_bytes(self) -> int:
        drawn = sum(state.number - state.first for state in self.decoding.values())
        return sum(map(len, self.prefilled.values())) + drawn

    def row_bytes(self, tokens: int) -> int:
        return tokens


@dataclass
class ScriptedPipeline:
    """A token's text is `<token>`; what comes behind `held` is held back; `stop` ends it, `bad` breaks it."""

    held: int | None = None
    stop: int | None = None
    bad: int | None = None
    stopped: bool = False
    reasoning_tokens: int = 0
    has_called: bool = False
    stop_string: str = ""
    _kept: str = ""

    def push(self, token: int) -> Growth:
        if token == self.bad:
            raise Broken("the pipeline")
        if token == self.stop:
            self.stopped = True
            return Growth()
        text, self._kept = self._kept + f"<{token}>", ""
        if token == self.held:
            text, self._kept = "", text
        return Growth(text)

    def flush(self) -> Growth:
        text, self._kept = self._kept, ""
        return Growth(text)

    def spell(self, token: int) -> bytes:
        return b"<%d>" % token


class Inbox:
    """The loop's inbox. When the loop would wait for ever the test is over: it is told to stop."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.timeouts: list[float] = []
        self.idle = False

    def put(self, command: Command) -> None:
        self.commands.append(command)

    def empty(self) -> bool:
        return not self.commands

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        if not self.commands and block and timeout is not None:
            self.timeouts.append(timeout)
            self.on_wait()
        if self.commands:
            return self.commands.pop(0)
        if block and timeout is None:
            self.idle = True
            return Stop()
        raise queue.Empty


@dataclass
class House:
    """A loop on the scripted engine, run to its end on the test's own thread."""

    rows_max: int = 4
    prefill_tokens: int = 8
    bytes_max: int | None = None
    admission_window_s: float = 0.0
    store_bytes: int | None = None
    """What may be stored; None: nothing is, nor reused. Else the engine has a shape."""
    image_bytes_max: int | None = None
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    inbox: Inbox = field(default_factory=Inbox)
    published: list[Message] = field(default_factory=list)
    pipelines: dict[str, Callable[[], Pipeline]] = field(default_factory=dict)
    pictures: dict[str, tuple[Picture, ...]] = field(default_factory=dict)
    backlog: Callable[[], int] = lambda: 0
    publish_also: Callable[[], object] = lambda: None
    """Called with every message."""
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.store: Store | None = None
        if self.store_bytes is not None:
            assert self.engine.shape is not None
            index = PrefixIndex(self.engine.shape)
            self.store = Store(self.engine, index, self.store_bytes, self.inbox.put)
        self.loop = Loop(
            model=Model(
                facts=Facts("m", 100, 0, Capabilities()),
                engine=self.engine,
                open_preparer=self._no_preparer,
                open_pipeline=lambda request: self.pipelines.get(request.id, ScriptedPipeline)(),
            ),
            scheduler=Scheduler(
                Policy(
                    rows_max=self.rows_max,
                    prefill_tokens=self.prefill_tokens,
                    bytes_max=self.bytes_max,
                    row_bytes=self.engine.row_bytes,
                    image_bytes_max=self.image_bytes_max,
                ),
                self.store.index if self.store else None,
            ),
            store=self.store,
            inbox=self.inbox,  # type: ignore[arg-type]
            publisher=Publisher(INCARNATION, self._publish, lambda: self.backlog()),
            admission=AdmissionWindow(self.admission_window_s),
            clock=lambda: self.now,
        )

    def _publish(self, message: Message) -> None:
        self.published.append(message)
        self.publish_also()

    def _no_preparer(self, context_length: int) -> Preparer:
        raise AssertionError("the loop prepares nothing")

    def submit(
        self,
        id: str,
        *script: int,
        prompt: int = 3,
        like: str | None = None,
        max_tokens: int = 99,
        draw: Draw = Draw(),  # noqa: B008
        priority: int = 0,
        deadline_s: float | None = None,
        tokens: tuple[int, ...] = (),
        salt: str = "",
        boundaries: tuple[int, ...] = (),
        resume: tuple[int, ...] = (),
        echo: bool = False,
        scored: int = 0,
        images: Sequence[Image] = (),
    ) -> None:
        """A request whose answer is `script`, then the end token. `like`: it has the prompt of that one, or
        it has `tokens`. `images` stand in place of what these have there."""
        first = 100_000 * (1 + len(self.engine.prompts))
        if not tokens:
            tokens = tuple(range(first, first + prompt)) if like is None else self.engine.prompts[like]
        pictures = tuple(picture(*image) for image in images) if like is None else self.pictures[like]
        for each in pictures:
            tokens = (*tokens[: each.first], *each.keys(), *tokens[each.end :])
        self.pictures[id] = pictures
        self.engine.prompts[id], self.engine.scripts[id] = tokens, script
        request = Prepared(
            id=id,
            tokens=tokens,
            draw=draw,
            stop=(),
            max_tokens=max_tokens,
            end_tokens=frozenset((END,)),
            priority=priority,
            deadline_s=deadline_s,
            salt=salt,
            boundaries=boundaries,
            resume=resume,
            echo=echo,
            scored=scored,
            pictures=pictures,
        )
        self.inbox.put(Submit(request))

    def drop(self, id: str | None) -> None:
        self.inbox.put(Drop(id))

    def run(self) -> None:
        """Until there is nothing left to do."""
        self.loop.run()
        assert self.inbox.idle, "stopped before all was done"
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing is left of any request, and the engine was used as agreed."""
        assert self.engine.breaches == []
        assert len(self.loop.scheduler) == 0
        assert self.engine.prefilled == {}
        assert self.engine.decoding == {}
        assert self.engine.shown == {}
        status = self.loop.scheduler.image_status
        if status is not None:
            kept = self.engine.kept.values()
            assert (status.bytes, status.kept) == (sum(kept), len(kept))
            assert status.bytes <= status.bytes_max or len(kept) == 1
        if self.store:
            held = [item for item in self.store.index._tree.items.values() if item.holds]
            assert held == []
            assert self.store.index.ram_bytes <= self.store.ram_max
        counters = self.loop.counters
        assert (counters.running, counters.waiting, counters.cache_bytes) == (0, 0, 0)

    # --- what was said ---

    def deltas(self, id: str) -> list[Delta]:
        events = [message for message in self.published if isinstance(message, Events)]
        return [delta for event in events for delta in event.deltas if delta.id == id]

    def text(self, id: str) -> str:
        deltas = self.deltas(id)
        assert [delta.sequence for delta in deltas] == list(range(len(deltas)))
        return "".join(delta.text for delta in deltas)

    def tokens(self, id: str) -> list[int]:
        return [token for delta in self.deltas(id) for token in delta.tokens]

    def ends(self, id: str) -> list[Finished | Failed]:
        return [m for m in self.published if isinstance(m, Finished | Failed) and m.id == id]

    def end(self, id: str) -> Finished | Failed:
        """The one end of a request, behind all it had to say."""
        [end] = self.ends(id)
        after = self.published[self.published.index(end) :]
        assert not any(d.id == id for m in after if isinstance(m, Events) for d in m.deltas)
        return end

    def reason(self, id: str) -> str:
        end = self.end(id)
        assert isinstance(end, Finished), end
        return end.reason

    def failed(self, id: str) -> bool:
        return isinstance(self.end(id), Failed)


def breaking(what: str) -> Callable[[], None]:
    """For `ScriptedEngine.at`."""

    def raise_it() -> None:
        raise Broken(what)

    return raise_it
