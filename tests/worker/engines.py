"""A scripted engine for the loop. It implements `Engine`'s contract and records every breach of it."""

from __future__ import annotations

import hashlib
import queue
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from protocol.messages import Failed, Finished, Message, StepOutputs
from protocol.types import Capabilities, Delta
from tests.factories import engine_request
from tests.scripted_worker.adapters import FakeAdapters
from worker.core.batching_window import BatchingWindow
from worker.core.commands import Abort, Command, Stop, Submit
from worker.core.engine_core import EngineCore
from worker.core.failures import PROBE
from worker.core.prefix.index import PrefixIndex
from worker.core.prefix.store import PrefixStore
from worker.core.publisher import Publisher
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.interfaces import DraftProposer, ImportanceScorer, Model, OutputProcessor, Preparer
from worker.values import (
    MEDIA_KEYS,
    NO_DRAFTS,
    NO_EMBEDDINGS,
    NO_LAST,
    NO_TARGETS,
    ArrayBytes,
    CacheSegment,
    CacheSlice,
    CacheSpec,
    EncodedImage,
    ForcedTokens,
    ImageInput,
    Logprob,
    LogprobTargets,
    MessageEnd,
    ModelInfo,
    OutputDelta,
    SamplingParams,
    StepOutput,
)

END = 0
INCARNATION = "worker-1"

Image = tuple[str, int, int]
"""Name (its hash is the digest), position in the prompt, and length in tokens of one byte each."""


def picture(name: str, first: int, tokens: int) -> ImageInput:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return ImageInput(digest, first, (7,) * tokens, {}, nbytes=tokens)


class Broken(Exception):
    """Scripted failure."""


@dataclass
class Decoding:
    """A started row. `first`, `number`: answer indices of its first token and of the next one to draw."""

    first: int
    number: int
    sampling: SamplingParams
    fed: bool = False


@dataclass(eq=False)
class Embedding:
    """An encoded image."""

    digest: str
    nbytes: int


@dataclass
class ScriptedEngine:
    """Draws the tokens of each row's script, then `END` forever.

    `at`: actions by call kind and index, counted from 0: the n-th step, prefill, fork or start. The
    health-check prompt is not counted and fails if `broken`. A token takes one byte.
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
    """Number of tokens of each prefill."""
    takes: Callable[[str, int], None] = lambda kind, size: None
    """Advances the clock for a step with `size` rows, or a prefill of `size` tokens."""
    shape: CacheSpec | None = None
    drafter: DraftProposer | None = None
    importance_scorer: ImportanceScorer | None = None
    can_skip_tokens: bool = False
    restored: dict[str, int] = field(default_factory=dict)
    """Number of tokens with which each row was last restored."""
    scored: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of each row for which logprobs were computed."""
    breaches: list[str] = field(default_factory=list)
    ill: dict[str, int] = field(default_factory=dict)
    """Number of tokens after which a row's grammar fails."""
    broken: bool = False
    looks: list[str] = field(default_factory=list)
    """Digests of the encoded images, in order."""
    kept: WeakValueDictionary[str, Embedding] = field(default_factory=WeakValueDictionary)
    """Embeddings that someone still holds."""
    shown: dict[str, tuple[ImageInput, ...]] = field(default_factory=dict)
    swells: float = 1.0
    """Ratio of an image's actual to its estimated size."""
    adapted: dict[str, str] = field(default_factory=dict)
    """The adapter of each row that has had one."""
    is_eager: bool = False
    """A row's first token is sampled with the end of its prompt, where the loop allows it."""
    ended: set[str] = field(default_factory=set)
    """Rows whose last token has been fed."""
    probes: int = 0
    resets: int = 0

    def _call(self, kind: str) -> None:
        number = self.calls[kind] = self.calls.get(kind, -1) + 1
        self.at.get((kind, number), lambda: None)()

    def _whole(self, row: str) -> tuple[int, ...]:
        return (*self.prompts[row], *self.scripts.get(row, ()))

    def encode_image(self, image: ImageInput) -> EncodedImage:
        if image.digest in self.kept:
            self.breaches.append(f"{image.digest} is encoded twice")
        self.takes("look", len(image.tokens))
        self._call("look")
        self.looks.append(image.digest)
        embedding = self.kept[image.digest] = Embedding(image.digest, round(self.swells * image.nbytes))
        return EncodedImage(embedding, embedding.nbytes)

    def set_images(self, row: str, tokens: Sequence[int], images: Sequence[ImageInput]) -> None:
        self._call("show")
        if self.prefilled.get(row) or row in self.decoding:
            self.breaches.append(f"{row} gets its images after its prefill has begun")
        if tuple(tokens) != self._whole(row)[: len(tokens)]:
            self.breaches.append(f"{row} gets its images with the wrong tokens {tokens}")
        self.shown[row] = tuple(images)

    def set_adapter(self, row: str, adapter: str) -> None:
        if self.prefilled.get(row) or row in self.decoding:
            self.breaches.append(f"{row} gets its adapter after its prefill has begun")
        self.adapted[row] = adapter

    def expect_tokens(self, row: str, tokens: int) -> None:
        if self.prefilled.get(row) or row in self.decoding:
            self.breaches.append(f"{row} is announced after its prefill has begun")

    def _check_images(
        self,
        row: str,
        begin: int,
        tokens: Sequence[int],
        embeddings: Mapping[str, EncodedImage] = NO_EMBEDDINGS,
        *,
        alone: bool,
    ) -> None:
        """Record a breach if a row is run or restored without its images set, or run without exactly those
        that it reaches."""
        if all(token < MEDIA_KEYS for token in self.prompts[row]):
            return
        if row not in self.shown or not alone:
            self.breaches.append(f"{row} is run in a batch, or its images were not set")
        reached = {
            image.digest
            for image in self.shown.get(row, ())
            if image.first < begin + len(tokens) and image.end > begin
        }
        if embeddings.keys() != reached or any(
            embeddings[each].payload is not self.kept[each] for each in reached
        ):
            self.breaches.append(f"{row} is run at {begin} with other images than its own")

    def prefill(
        self,
        chunks: Mapping[str, Sequence[int]],
        targets: Mapping[str, LogprobTargets] = NO_TARGETS,
        last: Mapping[str, int] = NO_LAST,
        embeddings: Mapping[str, EncodedImage] = NO_EMBEDDINGS,
    ) -> Mapping[str, Sequence[Logprob]]:
        if PROBE in chunks:
            self.probes += 1
            self.prefilled[PROBE] = [0]
            if self.broken:
                raise Broken("the whole engine")
            return {}
        stands = {len(self.prefilled.get(row, ())) for row in chunks}
        for row, tokens in chunks.items():
            cached = self.prefilled.setdefault(row, [])
            if row in self.decoding:
                self.breaches.append(f"{row} is prefilled after its start")
            if cached and len(stands) > 1:
                self.breaches.append(f"{row} continues in a batch with rows at other positions")
            if not tokens or tuple(tokens) != self._whole(row)[len(cached) : len(cached) + len(tokens)]:
                self.breaches.append(f"{row} at {len(cached)} gets the wrong tokens {tokens}")
            self._check_images(row, len(cached), tokens, embeddings, alone=len(chunks) == 1)
        self.groups.append(list(chunks))
        self.sizes.append(sum(map(len, chunks.values())))
        self.takes("prefill", self.sizes[-1])
        try:
            self._call("prefill")
        except Broken:
            for row in chunks:
                # Continuing with a lost cache is detected at the next chunk or at the start.
                self.prefilled[row] = [-1]
            raise
        for row, tokens in chunks.items():
            self.prefilled[row].extend(tokens)
        self._feed_last(last.keys() - targets.keys())
        return {row: self._score(row, asked) for row, asked in targets.items()}

    def _feed_last(self, rows: Set[str]) -> None:
        self.ended |= rows if self.is_eager else set()

    def _score(self, row: str, asked: LogprobTargets) -> list[Logprob]:
        """Return logprobs equal to the negative token ids, so that tests recognize each token."""
        whole, end = self._whole(row), len(self.prefilled[row]) + 1
        if asked.tokens != whole[end - len(asked.tokens) : end]:
            self.breaches.append(f"{row} is asked for the logprobs of {asked.tokens} at {end}")
        self.scored.setdefault(row, []).extend(asked.tokens)
        return [Logprob(-float(token), ((token, -float(token)),) * asked.top) for token in asked.tokens]

    def skip_tokens(self, row: str, first: int, last: int) -> None:
        self.breaches.append(f"{row} skips tokens, which this engine does not support")

    def fork(self, row: str, copy: str) -> None:
        self._call("fork")
        if row in self.decoding or copy in self.prefilled or copy in self.decoding:
            self.breaches.append(f"{copy} is forked from {row} at the wrong time")
        self.forks.append((row, copy))
        self.prefilled[copy] = list(self.prefilled[row])
        self.ended |= {copy} if row in self.ended else set()
        if row in self.shown:
            self.shown[copy] = self.shown[row]

    def start(
        self, row: str, tokens: Sequence[int], prompt_tokens: int, sampling: SamplingParams
    ) -> StepOutput:
        if row == PROBE:
            return StepOutput({}, {})
        self._call("start")
        cached = tuple(self.prefilled.get(row, ()))
        if cached != tuple(tokens[:-1]) or tuple(tokens) != self._whole(row)[: len(tokens)]:
            self.breaches.append(f"{row} starts with {cached} cached and {tokens}")
        if prompt_tokens != len(self.prompts[row]) or len(tokens) < prompt_tokens:
            self.breaches.append(f"{row} starts with {prompt_tokens} prompt tokens")
        if row in self.decoding:
            self.breaches.append(f"{row} starts twice")
        number = len(tokens) - prompt_tokens
        state = self.decoding[row] = Decoding(number, number, sampling)
        if row not in self.ended:
            return StepOutput({}, {})
        self.ended.remove(row)
        if number >= self.ill.get(row, sys.maxsize):
            return StepOutput({}, {}, {row: Broken("the grammar")})
        drawn = {row: self._draw(row, state)}
        return StepOutput(drawn, self._likelihoods(drawn))

    def copy_cache(
        self, row: str, runs: Sequence[tuple[int, int]], *, states: bool
    ) -> tuple[list[CacheSlice], CacheSlice | None]:
        fed = self._fed(row)
        if runs and runs[-1][1] != len(fed):
            self.breaches.append(f"{row} has {len(fed)} tokens and is stored up to {runs[-1][1]}")
        cuts = [CacheSlice(fed[first:last], last - first, complete_from=first) for first, last in runs]
        return cuts, CacheSlice(fed, 1) if states else None

    def _fed(self, row: str) -> tuple[int, ...]:
        """Return the tokens in a row's caches."""
        if row not in self.decoding:
            return tuple(self.prefilled[row])
        state = self.decoding[row]
        answered = [*self.scripts.get(row, ()), *[END] * state.number][: state.number]
        return (*self.prompts[row], *answered)[: None if state.fed else -1]

    def restore(self, row: str, pieces: Sequence[CacheSegment], states: object | None) -> None:
        if row in self.prefilled or row in self.decoding:
            self.breaches.append(f"{row} is restored over an existing cache")
        self._check_images(row, 0, (), alone=True)
        cached: list[int] = []
        for piece in pieces:
            assert isinstance(piece.payload, tuple)
            if piece.first != len(cached) or piece.count > piece.last - piece.first:
                self.breaches.append(f"{row} is restored with a gap at {len(cached)}")
            cached += piece.payload[: piece.count]
        if self.shape and self.shape.has_states and states != tuple(cached):
            self.breaches.append(f"{row} is restored with the states {states} at {cached}")
        if tuple(cached) != self._whole(row)[: len(cached)]:
            self.breaches.append(f"{row} is restored with {cached}")
        self.restored[row] = len(cached)
        self.prefilled[row] = cached

    def pack(self, payload: object) -> tuple[dict[str, ArrayBytes], Any]:
        assert isinstance(payload, tuple)
        return {}, list(payload)

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def unpack(self, blobs: Mapping[str, ArrayBytes], rest: Any) -> CacheSlice:
        return CacheSlice(tuple(rest), len(rest))

    def step(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> StepOutput:
        if not self.decoding:
            self.breaches.append("a step without rows")
        self._call("step")
        self.takes("step", sum(state.fed for state in self.decoding.values()))
        drawn = {}
        failed = {row: Broken("the grammar") for row in self.decoding if self._is_ill(row)}
        for row, state in self.decoding.items():
            if state.fed and row not in failed:
                drawn[row] = self._draw(row, state)
            state.fed = True
        return StepOutput(drawn, self._likelihoods(drawn), failed)

    def _draw(self, row: str, state: Decoding) -> int:
        script, number = self.scripts.get(row, ()), state.number
        state.number += 1
        return script[number] if number < len(script) else END

    def _likelihoods(self, drawn: Mapping[str, int]) -> Mapping[str, Logprob]:
        asking = [row for row in drawn if self.decoding[row].sampling.logprobs is not None]
        return {row: Logprob(-0.25, ((drawn[row], -0.25), (9, -2.0))) for row in asking}

    def forced_tokens(self, row: str, most: int) -> ForcedTokens:
        if row not in self.decoding:
            self.breaches.append(f"{row} is asked for forced tokens before its start")
        return ForcedTokens()

    def _is_ill(self, row: str) -> bool:
        state = self.decoding[row]
        return state.fed and row in self.ill and state.number >= self.ill[row]

    def drop(self, row: str) -> None:
        self.prefilled.pop(row, None)
        self.ended.discard(row)
        self.decoding.pop(row, None)
        self.shown.pop(row, None)

    def reset(self) -> None:
        self.resets += 1
        self.prefilled.clear()
        self.decoding.clear()
        self.shown.clear()

    def cache_bytes(self) -> int:
        rows = {row: len(cached) for row, cached in self.prefilled.items()}
        for row, state in self.decoding.items():
            rows[row] = rows.get(row, 0) + state.number - state.first
        return sum(rows.values())

    def row_bytes(self, tokens: int) -> int:
        return tokens


@dataclass
class ScriptedPipeline:
    """A token's text is `<token>`. Text from `held` on is held back; `stop` ends the answer, `bad` raises."""

    held: int | None = None
    stop: int | None = None
    bad: int | None = None
    stopped: bool = False
    reasoning_tokens: int = 0
    has_called: bool = False
    stop_string: str = ""
    _kept: str = ""

    def push(self, token: int) -> OutputDelta:
        if token == self.bad:
            raise Broken("the pipeline")
        if token == self.stop:
            self.stopped = True
            return OutputDelta()
        text, self._kept = self._kept + f"<{token}>", ""
        if token == self.held:
            text, self._kept = "", text
        return OutputDelta(text)

    def flush(self, *, has_ended: bool = False) -> OutputDelta:
        text, self._kept = self._kept, ""
        return OutputDelta(text)

    def spell(self, token: int) -> bytes:
        return b"<%d>" % token


class Inbox:
    """The loop's inbox. When the loop would wait forever, the test is over and it gets `Stop`."""

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
    """Capacity of the prefix store; None: no store. Otherwise the engine has a `shape`."""
    image_bytes_max: int | None = None
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    adapters: FakeAdapters = field(default_factory=FakeAdapters)
    inbox: Inbox = field(default_factory=Inbox)
    published: list[Message] = field(default_factory=list)
    pipelines: dict[str, Callable[[], OutputProcessor]] = field(default_factory=dict)
    images: dict[str, tuple[ImageInput, ...]] = field(default_factory=dict)
    backlog: Callable[[], int] = lambda: 0
    publish_also: Callable[[], object] = lambda: None
    """Called with every message."""
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.store: PrefixStore | None = None
        if self.store_bytes is not None:
            assert self.engine.shape is not None
            index = PrefixIndex(self.engine.shape)
            self.store = PrefixStore(self.engine, index, self.store_bytes, self.inbox.put)
        model = Model(
            info=ModelInfo("m", 100, 0, Capabilities()),
            engine=self.engine,
            open_preparer=self._no_preparer,
            open_output_processor=lambda request: self.pipelines.get(request.id, ScriptedPipeline)(),
            adapters=self.adapters,
        )
        scheduler = Scheduler(
            SchedulerConfig(
                rows_max=self.rows_max,
                prefill_tokens=self.prefill_tokens,
                bytes_max=self.bytes_max,
                row_bytes=self.engine.row_bytes,
                image_bytes_max=self.image_bytes_max,
            ),
            self.store.index if self.store else None,
        )
        self.loop = EngineCore(
            model=model,
            scheduler=scheduler,
            context_length=10,
            store=self.store,
            inbox=self.inbox,  # type: ignore[arg-type]
            publisher=Publisher(INCARNATION, self._publish, lambda: self.backlog()),
            admission=BatchingWindow(self.admission_window_s),
            clock=lambda: self.now,
        )

    def _publish(self, message: Message) -> None:
        self.published.append(message)
        self.publish_also()

    def _no_preparer(self, context_length: int) -> Preparer:
        raise AssertionError("the loop must not prepare requests")

    def submit(
        self,
        id: str,
        *script: int,
        prompt: int = 3,
        like: str | None = None,
        max_tokens: int = 99,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        priority: int = 0,
        deadline_s: float | None = None,
        tokens: tuple[int, ...] = (),
        salt: str = "",
        boundaries: tuple[int, ...] = (),
        message_ends: tuple[MessageEnd, ...] = (),
        resume: tuple[int, ...] = (),
        echo: bool = False,
        scored: int = 0,
        images: Sequence[Image] = (),
        adapter: str = "",
    ) -> None:
        """Submit a request whose answer is `script`, then the end token. Its prompt is `tokens`, or that of
        request `like`. `images` replace the tokens at their positions."""
        first = 100_000 * (1 + len(self.engine.prompts))
        if not tokens:
            tokens = tuple(range(first, first + prompt)) if like is None else self.engine.prompts[like]
        inputs = tuple(picture(*each) for each in images) if like is None else self.images[like]
        for each in inputs:
            tokens = (*tokens[: each.first], *each.keys(), *tokens[each.end :])
        self.images[id] = inputs
        self.engine.prompts[id], self.engine.scripts[id] = tokens, script
        request = engine_request(
            id,
            tokens,
            sampling=sampling,
            max_tokens=max_tokens,
            end_tokens=frozenset((END,)),
            priority=priority,
            deadline_s=deadline_s,
            salt=salt,
            boundaries=boundaries,
            message_ends=message_ends,
            resume=resume,
            echo=echo,
            scored=scored,
            images=inputs,
            adapter=adapter,
        )
        self.inbox.put(Submit(request))

    def drop(self, id: str) -> None:
        self.inbox.put(Abort(id))

    def run(self) -> None:
        """Run until no work is left."""
        self.loop.run()
        assert self.inbox.idle, "the loop stopped before all work was done"
        self.check_empty()

    def check_empty(self) -> None:
        """Check that no request has left anything behind and that the engine's contract was kept."""
        assert self.engine.breaches == []
        assert len(self.loop.scheduler) == 0
        assert self.engine.prefilled == {}
        assert self.engine.decoding == {}
        assert self.engine.shown == {}
        status = self.loop.scheduler.image_status
        if status is not None:
            kept = [each.nbytes for each in self.engine.kept.values()]
            assert (status.bytes, status.kept) == (sum(kept), len(kept))
            assert status.bytes <= status.bytes_max or len(kept) == 1
        if self.store:
            held = [item for item in self.store.index._tree.items.values() if item.holds]
            assert held == [] or self.store._reading, "items are pinned although no read is pending"
            assert self.store.index.ram_bytes <= self.store.ram_max
        counters = self.loop.counters
        assert (counters.running, counters.waiting, counters.cache_bytes) == (0, 0, 0)

    # --- inspection of the messages ---

    def deltas(self, id: str) -> list[Delta]:
        events = [message for message in self.published if isinstance(message, StepOutputs)]
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
        """Return the only end of a request, which must follow all its output."""
        [end] = self.ends(id)
        after = self.published[self.published.index(end) :]
        assert not any(d.id == id for m in after if isinstance(m, StepOutputs) for d in m.deltas)
        return end

    def reason(self, id: str) -> str:
        end = self.end(id)
        assert isinstance(end, Finished), end
        return end.reason

    def failed(self, id: str) -> bool:
        return isinstance(self.end(id), Failed)


def breaking(what: str) -> Callable[[], None]:
    """Return an action for `ScriptedEngine.at` that raises `Broken`."""

    def raise_it() -> None:
        raise Broken(what)

    return raise_it
