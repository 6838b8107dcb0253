"""Tokenizers of one model, opened while its weights load: each thread needs its own."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.settings.parsers import RECOGNIZED, NamedParsers
from worker.input.locks import OPEN_S_MAX
from worker.input.prompts.prompt import open_tokenizer
from worker.load.config import ModelConfig


class Tokenizers:
    """Pool of tokenizers, each handed out once. `take` may be called on any thread."""

    def __init__(
        self, folder: Path, config: ModelConfig, prefetch: int = 0, parsers: NamedParsers = RECOGNIZED
    ) -> None:
        """`prefetch`: number of tokenizers to open now, one after another, on a separate thread."""
        self._folder, self._config, self._parsers = folder, config, parsers
        self._opened: deque[Future[TokenizerWrapper]] = deque()
        if prefetch:
            executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizers")
            self._opened.extend(executor.submit(self._open) for _ in range(prefetch))
            executor.shutdown(wait=False)

    def take(self) -> TokenizerWrapper:
        """Return a prefetched tokenizer, or open a new one. Raises what upstream raises, or `TimeoutError` if
        a prefetched one is not open within `OPEN_S_MAX` seconds."""
        try:
            future = self._opened.popleft()
        except IndexError:
            return self._open()
        try:
            return future.result(OPEN_S_MAX)
        except TimeoutError:
            raise TimeoutError(f"the tokenizer was not opened within {OPEN_S_MAX:g} s") from None

    def _open(self) -> TokenizerWrapper:
        return open_tokenizer(self._folder, self._config.end_tokens, self._parsers)
