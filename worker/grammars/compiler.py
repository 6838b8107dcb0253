"""Grammar compiler: compiles with llguidance, within limits of size and time, and caches the results.

Invariants: no pool thread waits longer than `COMPILE_S_MAX` for all grammars of a request, whatever it sends,
and at most `RUNNING_MAX` threads compile. llguidance cannot be interrupted, so each grammar is compiled on
its own thread, which is abandoned after the timeout. Its own limits bound the size of a grammar;
`worker.grammars.schema` refuses what they do not cover. The last `KEPT_MAX` results, refusals and running
compilations are cached: concurrent requests with one grammar compile it once.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from worker.contract.preparation import NEVER, CancelToken
from worker.grammars.tokenizer import GrammarTokenizer

COMPILE_S_MAX = 3.0
RUNNING_MAX = 2
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


_EXCERPT = "\n   1 | "
_starting = threading.Lock()
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


class GrammarError(Exception):
    """A grammar could not be compiled; the message is llguidance's or ours."""


class GrammarTimeoutError(GrammarError):
    """There was not enough time to compile a grammar."""


class Compiler:
    """Compiler with a cache. One per model, shared by all threads of the pool."""

    def __init__(self, lexicon: GrammarTokenizer) -> None:
        self._lexicon = lexicon
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Future[LLMatcher | str]] = OrderedDict()
        self._running = threading.Semaphore(RUNNING_MAX)

    def compile(self, grammar: str, wait_s_max: float = COMPILE_S_MAX) -> LLMatcher:
        """Compile a grammar, or return it from the cache. Callers must copy it. Raises `GrammarError`."""
        until = time.monotonic() + wait_s_max
        try:
            outcome = self._asked(grammar, wait_s_max).result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise GrammarTimeoutError(f"it takes longer than {wait_s_max:g} s to compile") from None
        if isinstance(outcome, str):
            raise GrammarError(outcome)
        return outcome

    def _asked(self, grammar: str, wait_s_max: float) -> Future[LLMatcher | str]:
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            if future := self._kept.get(key):
                self._kept.move_to_end(key)
                return future
            future = self._kept[key] = Future()
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        if self._running.acquire(timeout=wait_s_max):
            work = partial(self._run, grammar, future)
            _start(work)
        else:
            with self._lock:
                self._kept.pop(key, None)
            future.set_result("other grammars are still being compiled; try again later")
        return future

    def _run(self, grammar: str, future: Future[LLMatcher | str]) -> None:
        try:
            future.set_result(_compiled(self._lexicon, grammar))
        except BaseException as error:  # llguidance's panics are not `Exception`s; only the request fails
            future.set_result(f"it cannot be compiled ({type(error).__name__})")
        finally:
            self._running.release()


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
        """Compile a grammar within a share of the time that is left. Raises `GrammarError`, and
        `PreparationCancelled` after a cancellation."""
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
