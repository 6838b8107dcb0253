"""The scripted engine: a worker in its own real process, without MLX, that does what the prompt says.

It stands beside the real engine behind the same contract, so service, loop, scheduler and wire are the real
ones. Tests of the gateway and of faults run on it: `python -m worker.fake --endpoint … [--step-ms N]`.

A prompt's tokens are the words of its text. The answer's token at a position is a pure function of seed and
position, as the real engine promises. Words that begin with `!` are directions:

    !tokens=N   answer with N tokens (else 32)         !slow=MS    a step with this row aboard takes so long
    !die=N      the process is killed at token N        !hang=N    the model thread blocks for good at token N
    !fail=N     the step fails at token N               !oom       the prefill runs out of memory
    !burst      the process is killed in the prefill    (of a prompt with two words or more)
    !bad        the request can't be prepared           !text=S    the answer's every token reads S
    !prefill=MS a chunk of this prompt takes so long
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakValueDictionary

from msgspec import Meta, Struct

from protocol import lifeline, logs, settings, sockets
from protocol.errors import Code, RequestError
from protocol.messages import Capabilities, Generate
from protocol.workersettings import Bytes, WorkerSettings
from worker.contract import (
    Blob,
    Cut,
    Draw,
    Facts,
    Likelihood,
    Model,
    ModelError,
    NoRoomError,
    Piece,
    Prepared,
    Progress,
    Shape,
    Step,
)
from worker.line.service import Service

CONTEXT_LENGTH = 8192
TOKEN_BYTES = 16
TOKENS_DEFAULT = 32
END = 0
WORDS = ("steam", "signal", "turntable", "wagon", "tender", "駅", "🚂", "boiler", "rails", "whistle")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Script:
    """What a prompt asks of the engine, by token number where it has one."""

    tokens: int = TOKENS_DEFAULT
    slow_ms: float = 0.0
    prefill_ms: float = 0.0
    die: int | None = None
    hang: int | None = None
    fail: int | None = None
    oom: bool = False
    burst: bool = False
    bad: bool = False
    text: str | None = None

    @classmethod
    def read(cls, text: str) -> Script:
        """The directions in a prompt. Raises `RequestError` for one that is not known."""
        fields: dict[str, Any] = {}
        for word in text.split():
            if not word.startswith("!"):
                continue
            name, _, value = word[1:].partition("=")
            if name not in _DIRECTIONS:
                raise RequestError(Code.INVALID_REQUEST, f"unknown direction !{name}", param="messages")
            field_name, kind = _DIRECTIONS[name]
            fields[field_name] = kind(value)
        return cls(**fields)


_DIRECTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "tokens": ("tokens", int),
    "slow": ("slow_ms", float),
    "prefill": ("prefill_ms", float),
    "die": ("die", int),
    "hang": ("hang", int),
    "fail": ("fail", int),
    "oom": ("oom", lambda value: True),
    "burst": ("burst", lambda value: True),
    "bad": ("bad", lambda value: True),
    "text": ("text", str),
}


@dataclass(frozen=True, slots=True)
class FakePrepared(Prepared):
    """A request that keeps its script alive: a row may be dropped, and started again."""

    script: Script = field(default_factory=Script)


@dataclass(slots=True)
class FakeRow:
    """A started row. `fed`: a step has set out to draw its next token."""

    script: Script
    draw: Draw
    prompt_tokens: int
    drawn: int
    fed: bool = False


@dataclass(slots=True)
class FakeEngine:
    """Rows that follow their scripts, which come from the preparers over a mapping that both share."""

    scripts: MutableMapping[str, Script]
    step_ms: float
    shape: Shape | None = field(default_factory=Shape)
    rows: dict[str, FakeRow] = field(default_factory=dict)

    def prefill(self, chunks: Mapping[str, Sequence[int]]) -> None:
        if any(self._script(row).burst for row in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(self._script(row).oom for row in chunks):
            raise MemoryError("scripted: out of memory")
        time.sleep(max(self._script(row).prefill_ms for row in chunks) / 1000)

    def fork(self, row: str, copy: str) -> None:
        """Rows have no caches here."""

    def start(self, row: str, tokens: Sequence[int], prompt_tokens: int, draw: Draw) -> None:
        script = self._script(row)
        if script.oom:
            raise MemoryError("scripted: out of memory")
        self.rows[row] = FakeRow(script, draw, prompt_tokens, drawn=len(tokens) - prompt_tokens)

    def _script(self, row: str) -> Script:
        return self.scripts.get(row, Script())

    def step(self) -> Step:
        pause_ms = max([self.step_ms, *(row.script.slow_ms for row in self.rows.values())])
        if pause_ms:
            time.sleep(pause_ms / 1000)
        drawn = {id: self._draw(row) for id, row in self.rows.items() if row.fed}
        for row in self.rows.values():
            row.fed = True
        asking = {id: self.rows[id].draw.logprobs for id in drawn}
        return Step(drawn, {id: _likelihood(drawn[id], top) for id, top in asking.items() if top is not None})

    def _draw(self, row: FakeRow) -> int:
        script, number = row.script, row.drawn
        if number == script.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == script.hang:
            threading.Event().wait()
        if number == script.fail:
            raise RuntimeError("scripted: the step fails")
        if number >= script.tokens:
            return END
        row.drawn += 1
        seed = row.draw.seed if row.draw.temperature else 0
        return 1 + (seed + 7 * (row.prompt_tokens + number)) % len(WORDS)

    def drop(self, row: str) -> None:
        self.rows.pop(row, None)

    def reset(self) -> None:
        self.rows.clear()

    def cut(self, row: str, runs: Sequence[tuple[int, int]], *, states: bool) -> tuple[list[Cut], Cut | None]:
        """Rows have no caches here, so copies are of nothing, at the price of tokens."""
        cuts = [Cut((first, last), TOKEN_BYTES * (last - first), whole_from=first) for first, last in runs]
        return cuts, Cut((), TOKEN_BYTES) if states else None

    def restore(self, row: str, pieces: Sequence[Piece], states: object | None) -> None:
        """See `cut`."""

    def pack(self, payload: object) -> tuple[dict[str, Blob], Any]:
        return {"nothing": Blob("U8", (TOKEN_BYTES,), bytes(TOKEN_BYTES))}, payload

    def unpack(self, blobs: Mapping[str, Blob], rest: Any) -> Cut:
        return Cut(tuple(rest), TOKEN_BYTES)

    def cache_bytes(self) -> int:
        return sum(self.row_bytes(row.prompt_tokens + row.drawn) for row in self.rows.values())

    def row_bytes(self, tokens: int) -> int:
        return TOKEN_BYTES * tokens


def _likelihood(token: int, top: int) -> Likelihood:
    """The drawn token is the likeliest, those after it in the vocabulary follow."""
    others = [(token + n) % (len(WORDS) + 1) for n in range(top)]
    return Likelihood(-0.5, tuple((other, -0.5 * (1 + n)) for n, other in enumerate(others)))


@dataclass(slots=True)
class FakePreparer:
    scripts: MutableMapping[str, Script]

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        text = request.prompt or "\n".join(_texts(request.messages or []))
        script = Script.read(text)
        if script.bad:
            raise ValueError("scripted: cannot be prepared")
        tokens = tuple(1 + len(word) for word in text.split()) or (1,)
        if len(tokens) >= CONTEXT_LENGTH:
            message = f"This model's maximum context length is {CONTEXT_LENGTH} tokens. "
            message += f"However, your messages resulted in {len(tokens)} tokens."
            raise RequestError(Code.CONTEXT_LENGTH_EXCEEDED, message, param="messages")
        # What came twice over a bad line is one request: its row follows the script that was here first.
        script = self.scripts.setdefault(request.id, script)
        return FakePrepared(
            id=request.id,
            tokens=tokens,
            draw=Draw(
                seed=request.sampling.seed,
                temperature=request.sampling.temperature or 0.0,
                logprobs=request.sampling.logprobs,
            ),
            stop=tuple(request.stop),
            max_tokens=request.max_tokens or CONTEXT_LENGTH - len(tokens),
            end_tokens=frozenset() if request.ignore_eos else frozenset((END,)),
            priority=request.priority,
            deadline_s=request.deadline_s,
            salt=request.cache_salt,
            pin=request.cache_pin,
            resume=tuple(request.resume),
            script=script,
        )


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        texts += map(str, parts)
    return texts


@dataclass(slots=True)
class FakePipeline:
    """Tokens are whole words, so nothing has to be held back; stop strings are the real pipeline's matter."""

    text: str | None
    stopped: bool = False

    def push(self, token: int) -> str:
        return self.text if self.text is not None else WORDS[(token - 1) % len(WORDS)] + " "

    def flush(self) -> str:
        return ""

    def spell(self, token: int) -> bytes:
        return b"" if token == END else self.push(token).encode()


@dataclass(slots=True)
class FakeLoader:
    """Loads nothing, in `load_s` seconds."""

    name: str
    step_ms: float = 0.0
    load_s: float = 0.0
    images: bool = False
    broken: bool = False
    crowded: bool = False
    identity: str = ""

    def load(self, progress: Progress) -> Model:
        if self.broken:
            raise ModelError("scripted: the model cannot be loaded")
        if self.crowded:
            raise NoRoomError("scripted: there is no room for the model")
        for tenth in range(10):
            progress(tenth * 1000, 10_000)
            time.sleep(self.load_s / 10)
        scripts: MutableMapping[str, Script] = WeakValueDictionary()
        return Model(
            facts=Facts(
                self.name, CONTEXT_LENGTH, 0, Capabilities(images=self.images), identity=self.identity
            ),
            engine=FakeEngine(scripts, self.step_ms),
            open_preparer=lambda: FakePreparer(scripts),
            open_pipeline=lambda request: FakePipeline(scripts.get(request.id, Script()).text),
        )


class FakeSettings(Struct, frozen=True, kw_only=True, rename=settings.public_name):
    """What can be set on the command line of `python -m worker.fake`."""

    endpoint: Annotated[str, Meta(description="where the gateway is")]
    name: Annotated[str, Meta(description="the model's name")] = "fake"
    served_name: Annotated[str, Meta(description="another one, as a supervisor gives it")] = ""
    model: Annotated[str, Meta(description="which model it is: what another began, it does not finish")] = ""
    curve_keys: Annotated[Path | None, Meta(description="folder with CURVE keys")] = None
    max_running: Annotated[int, Meta(ge=1, description="rows")] = 16
    cache_limit_bytes: Annotated[Bytes | None, Meta(description="bytes for caches")] = None
    step_ms: Annotated[float, Meta(ge=0, description="how long a step takes")] = 0.0
    load_s: Annotated[float, Meta(ge=0, description="how long loading takes")] = 0.0
    stall_timeout_s: Annotated[float, Meta(gt=0, description="seconds without a step")] = 120.0
    drain_timeout_s: Annotated[float, Meta(ge=0, description="seconds that rows get to end")] = 10.0
    images: Annotated[bool, Meta(description="claims to take images")] = False
    broken: Annotated[bool, Meta(description="cannot be loaded")] = False
    crowded: Annotated[bool, Meta(description="does not fit into memory now")] = False
    log_level: Annotated[logs.Level, Meta(description="debug, info, warning or error")] = "info"


def main() -> int:
    """Like `python -m worker`, on the scripted engine."""
    about = "A worker with a scripted engine, for tests."
    configured = settings.read_or_exit(
        FakeSettings, "worker", sys.argv[1:], {}, program="worker.fake", about=about
    )
    logs.setup("fake", "text", configured.log_level)
    lifeline.follow_parent()
    loader = FakeLoader(
        configured.served_name or configured.name,
        configured.step_ms,
        configured.load_s,
        configured.images,
        configured.broken,
        configured.crowded,
        configured.model,
    )
    worker_settings = WorkerSettings(
        endpoint=configured.endpoint,
        curve_keys=configured.curve_keys,
        max_running=configured.max_running,
        cache_limit_bytes=configured.cache_limit_bytes,
        stall_timeout_s=configured.stall_timeout_s,
        drain_timeout_s=configured.drain_timeout_s,
    )
    try:
        return Service(loader, worker_settings).run()
    except sockets.EndpointError as error:
        settings.exit_with("worker.fake", str(error))


if __name__ == "__main__":
    raise SystemExit(main())
