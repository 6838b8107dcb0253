"""Grammar compiler: compiles with llguidance, within limits of size and time, and caches the results.

Invariants: no pool thread waits longer than `COMPILE_S_MAX` for all grammars of a request, whatever it sends;
at most `RUNNING_MAX` threads compile what somebody waits for, and at most `ABANDONED_MAX` what took too long:
llguidance cannot be interrupted, so each grammar is compiled on its own thread, which is abandoned after the
timeout. A grammar that could not begin in time is no fault of its request: the compiler is busy. llguidance's
limits bound the size of a grammar; `worker.grammars.schema` refuses what they do not cover. The last
`KEPT_MAX` results, refusals and running compilations are cached: concurrent requests with one grammar compile
it once.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from worker.grammars.tokenizer import GrammarTokenizer
from worker.values import NEVER, CancelToken

COMPILE_S_MAX = 3.0
RUNNING_MAX = 2
ABANDONED_MAX = 4
KEPT_MAX = 64
STACK_BYTES = 2**29
"""Stack of a thread that compiles. llguidance recurses along references: with the system's 8 MiB, a chain of
1,500 definitions ends the process, and our limits of text allow for 30,000. Unused pages take no memory."""

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""llguidance's defaults, except for lexer states, which take 1 to 2 kB each until the answer ends. They allow
about 15 ms of lexer time and 3 ms of parser time per step."""


_OWN_SHARE_MIN = 0.9
"""Share of its time that a grammar must have had itself to be refused for taking too long."""
_EXCERPT = "\n   1 | "
_starting = threading.Lock()
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


class GrammarError(Exception):
    """A grammar could not be compiled; the message is llguidance's or ours."""


class GrammarTimeoutError(GrammarError):
    """A grammar takes too long to compile."""


class CompilerBusyError(Exception):
    """Other grammars are being compiled: the same request may succeed later."""


@dataclass(eq=False)
class _Compilation:
    """The compilation of one grammar. `outcome`: the matcher, or why there is none."""

    outcome: Future[LLMatcher | str] = field(default_factory=Future)
    began_at: float | None = None
    is_abandoned: bool = False


class Compiler:
    """Compiler with a cache. One per model, shared by all threads of the pool."""

    def __init__(self, lexicon: GrammarTokenizer) -> None:
        self._lexicon = lexicon
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Compilation] = OrderedDict()
        self._running = threading.Semaphore(RUNNING_MAX)
        self._abandoned = threading.Semaphore(ABANDONED_MAX)

    def compile(self, grammar: str, wait_s_max: float = COMPILE_S_MAX) -> LLMatcher:
        """Compile a grammar, or return it from the cache. Callers must copy it. Raises `GrammarError`, and
        `CompilerBusyError` if it did not have the time that it may take."""
        until = time.monotonic() + wait_s_max
        compilation = self._asked(grammar, wait_s_max)
        try:
            outcome = compilation.outcome.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            began_at = compilation.began_at
            if began_at is None or until - began_at < _OWN_SHARE_MIN * wait_s_max:
                raise CompilerBusyError from None
            self._abandon(compilation)
            raise GrammarTimeoutError(f"it takes longer than {wait_s_max:g} s to compile") from None
        if isinstance(outcome, str):
            raise GrammarError(outcome)
        return outcome

    def _asked(self, grammar: str, wait_s_max: float) -> _Compilation:
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            if compilation := self._kept.get(key):
                self._kept.move_to_end(key)
                return compilation
            compilation = self._kept[key] = _Compilation()
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        if self._running.acquire(timeout=wait_s_max):
            compilation.began_at = time.monotonic()
            _start(partial(self._run, grammar, compilation))
        else:
            with self._lock:
                self._kept.pop(key, None)
            compilation.outcome.set_exception(CompilerBusyError())
        return compilation

    def _abandon(self, compilation: _Compilation) -> None:
        """Let another grammar be compiled beside one that takes too long."""
        with self._lock:
            if compilation.is_abandoned or compilation.outcome.done():
                return
            if self._abandoned.acquire(blocking=False):
                compilation.is_abandoned = True
                self._running.release()

    def _run(self, grammar: str, compilation: _Compilation) -> None:
        outcome: LLMatcher | str
        try:
            outcome = _compiled(self._lexicon, grammar)
        except BaseException as error:  # llguidance's panics are not `Exception`s; only the request fails
            outcome = f"it cannot be compiled ({type(error).__name__})"
        with self._lock:
            compilation.outcome.set_result(outcome)
            (self._abandoned if compilation.is_abandoned else self._running).release()


class CompileBudget:
    """Compiler for the grammars of one request, which share `COMPILE_S_MAX`."""

    def __init__(self, compiler: Compiler, cancel_token: CancelToken = NEVER) -> None:
        """`cancel_token`: checked before each grammar."""
        self._compiler = compiler
        self._cancel_token = cancel_token
        self._until = time.monotonic() + COMPILE_S_MAX

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def compile(self, grammar: str, share: float = 1.0) -> LLMatcher:
        """Compile a grammar within a share of the time that is left. Raises `GrammarError`,
        `CompilerBusyError`, and `PreparationCancelled` after a cancellation."""
        self._cancel_token.check()
        return self._compiler.compile(grammar, share * self.left_s)


def _start(work: Callable[[], None]) -> None:
    """Start a thread with a stack of `STACK_BYTES`. Python's setting is of the process, hence the lock."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=work, name="compile", daemon=True).start()
        finally:
            threading.stack_size(before)


def _compiled(lexicon: GrammarTokenizer, grammar: str) -> LLMatcher | str:
    matcher = LLMatcher(lexicon.tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        # Compute the first mask here so that no step waits for it; copies share its lexer states.
        matcher.compute_bitmask()
    return _told(matcher.get_error()) if matcher.is_error() else matcher


def _told(error: str) -> str:
    """Return an error in one line, without our grammar's text and positions in it."""
    if "NoExtension" in error:
        return "no text can match it"
    said, _, _ = error.replace("<non-verbose/>", "").partition(_EXCERPT)
    return " ".join(_PLACE.sub("", said).split())
