"""Grammars compiled by llguidance, each once, within limits of size and time.

What must hold: whatever a request sends, no thread of the pool waits for its grammar longer than
`COMPILE_S_MAX`, and no more than `RUNNING_MAX` threads work on grammars. llguidance cannot be interrupted,
so each is compiled on a thread of its own, which nobody waits for in the end. Its own limits bound what a
grammar may take, and `worker.grammars.schema` refuses what it has no limit for. What has been compiled,
refused or is on its way is kept, the last `KEPT_MAX`: a grammar is compiled once, even when two ask at once.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from worker.grammars.lexicon import Lexicon

COMPILE_S_MAX = 3.0
RUNNING_MAX = 2
KEPT_MAX = 64

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""llguidance's own, but for the states of a lexer: one takes 1 to 2 kB, for as long as the answer does. Of a
step they allow some 15 ms of the lexer's work and 3 ms of the parser's."""


_EXCERPT = "\n   1 | "
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


class GrammarError(Exception):
    """Why a grammar is not compiled, in llguidance's words or ours."""


class Compiler:
    """One per model. Used by all threads of the pool."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Future[LLMatcher | str]] = OrderedDict()
        self._running = threading.Semaphore(RUNNING_MAX)

    def compile(self, grammar: str, wait_s_max: float = COMPILE_S_MAX) -> LLMatcher:
        """To be copied by whoever uses it. Raises `GrammarError`."""
        until = time.monotonic() + wait_s_max
        try:
            outcome = self._asked(grammar, wait_s_max).result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise GrammarError(f"it takes longer than {wait_s_max:g} s to compile") from None
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
            threading.Thread(target=work, name="compile", daemon=True).start()
        else:
            with self._lock:
                self._kept.pop(key, None)
            future.set_result("others are being compiled that take long")
        return future

    def _run(self, grammar: str, future: Future[LLMatcher | str]) -> None:
        try:
            future.set_result(_compiled(self._lexicon, grammar))
        except BaseException as error:  # llguidance's panics are no Exception; the request's failure
            future.set_result(f"it cannot be compiled ({type(error).__name__})")
        finally:
            self._running.release()


def _compiled(lexicon: Lexicon, grammar: str) -> LLMatcher | str:
    matcher = LLMatcher(lexicon.tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        # The first mask, so that no step has to wait for it; copies share what was found out for it.
        matcher.compute_bitmask()
    return _told(matcher.get_error()) if matcher.is_error() else matcher


def _told(error: str) -> str:
    """In one line, without the grammar that we have made of what was asked, and places in it."""
    if "NoExtension" in error:
        return "nothing fits it"
    said, _, _ = error.replace("<non-verbose/>", "").partition(_EXCERPT)
    return " ".join(_PLACE.sub("", said).split())
