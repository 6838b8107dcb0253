"""A scripted model for the loop: it keeps to the contract of `Engine` and notes every breach of it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.messages import Capabilities, Delta, Events, Failed, Finished, Message
from worker.contract import Draw, Facts, Model, Pipeline, Prepared
from worker.loop import Command, Drop, Loop, Stop, Submit
from worker.scheduler import Scheduler

END = 0
INCARNATION = "worker-1"


class Broken(Exception):
    """What the script says fails."""


@dataclass
class ScriptedEngine:
    """Draws the tokens of each row's script, then `END` for ever.

    `at` holds what happens at a call, by its number counted from 0: the n-th step, prefill or start of all.
    """

    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scripts: dict[str, Sequence[int]] = field(default_factory=dict)
    at: dict[tuple[str, int], Callable[[], None]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    prefilled: dict[str, list[int]] = field(default_factory=dict)
    decoding: dict[str, int] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)
    resets: int = 0

    def _call(self, kind: str) -> None:
        number = self.calls[kind] = self.calls.get(kind, -1) + 1
        self.at.get((kind, number), lambda: None)()

    def prefill(self, row: str, tokens: Sequence[int]) -> None:
        self._call("prefill")
        cached = self.prefilled.setdefault(row, [])
        if row in self.decoding:
            self.breaches.append(f"{row} is prefilled after its start")
        if tuple(tokens) != self.prompts[row][len(cached) : len(cached) + len(tokens)]:
            self.breaches.append(f"{row} at {len(cached)} is given {tokens}")
        cached.extend(tokens)

    def start(self, row: str, token: int, position: int, draw: Draw) -> None:
        self._call("start")
        cached = tuple(self.prefilled.get(row, ()))
        if (*cached, token) != self.prompts[row] or position != len(self.prompts[row]):
            self.breaches.append(f"{row} starts at {position} with {cached} cached and {token}")
        if row in self.decoding:
            self.breaches.append(f"{row} starts twice")
        self.decoding[row] = 0

    def step(self) -> Mapping[str, int]:
        if not self.decoding:
            self.breaches.append("a step with no row")
        self._call("step")
        drawn = {}
        for row, number in self.decoding.items():
            script = self.scripts.get(row, ())
            drawn[row] = script[number] if number < len(script) else END
            self.decoding[row] += 1
        return drawn

    def drop(self, row: str) -> None:
        self.prefilled.pop(row, None)
        self.decoding.pop(row, None)

    def reset(self) -> None:
        self.resets += 1
        self.prefilled.clear()
        self.decoding.clear()

    def cache_bytes(self) -> int:
        return sum(map(len, self.prefilled.values())) + sum(self.decoding.values())


@dataclass
class ScriptedPipeline:
    """A token's text is `<token>`; what comes behind `held` is held back; `stop` ends it, `bad` breaks it."""

    held: int | None = None
    stop: int | None = None
    bad: int | None = None
    stopped: bool = False
    _kept: str = ""

    def push(self, token: int) -> str:
        if token == self.bad:
            raise Broken("the pipeline")
        if token == self.stop:
            self.stopped = True
            return ""
        text, self._kept = self._kept + f"<{token}>", ""
        if token == self.held:
            text, self._kept = "", text
        return text

    def flush(self) -> str:
        text, self._kept = self._kept, ""
        return text


class Inbox:
    """The loop's inbox. When the loop would wait for ever the test is over: it is told to stop."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.idle = False

    def put(self, command: Command) -> None:
        self.commands.append(command)

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        if not self.commands and block and timeout is not None:
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
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    inbox: Inbox = field(default_factory=Inbox)
    published: list[Message] = field(default_factory=list)
    pipelines: dict[str, Callable[[], Pipeline]] = field(default_factory=dict)
    backlog: Callable[[], int] = lambda: 0
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.loop = Loop(
            model=Model(
                facts=Facts("m", 100, 0, Capabilities(), None),
                engine=self.engine,
                open_preparer=self._no_preparer,
                open_pipeline=lambda request: self.pipelines.get(request.id, ScriptedPipeline)(),
            ),
            scheduler=Scheduler(rows_max=self.rows_max, prefill_tokens=self.prefill_tokens),
            incarnation=INCARNATION,
            inbox=self.inbox,  # type: ignore[arg-type]
            publish=self.published.append,
            backlog=lambda: self.backlog(),
            clock=lambda: self.now,
        )

    def _no_preparer(self) -> None:  # type: ignore[return]
        raise AssertionError("the loop prepares nothing")

    def submit(self, id: str, *script: int, prompt: int = 3, max_tokens: int = 99) -> None:
        """A request whose answer is `script`, then the end token."""
        tokens = tuple(100 + n for n in range(prompt))
        self.engine.prompts[id], self.engine.scripts[id] = tokens, script
        self.inbox.put(
            Submit(
                Prepared(
                    id=id,
                    tokens=tokens,
                    draw=Draw(),
                    stop=(),
                    max_tokens=max_tokens,
                    end_tokens=frozenset((END,)),
                )
            )
        )

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
