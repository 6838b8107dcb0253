"""The tokenizers of one model, opened while its weights are read: each thread that uses one needs its own."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from worker.models.config import ModelConfig
from worker.models.prompt import open_tokenizer


class Tokenizers:
    """Each that is taken is taken once; `take` may be called on any thread."""

    def __init__(self, folder: Path, config: ModelConfig, ahead: int = 0) -> None:
        """`ahead`: so many are opened from now on, one after another, on a thread of their own."""
        self._folder, self._config = folder, config
        self._opened: deque[Future[TokenizerWrapper]] = deque()
        if ahead:
            executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizers")
            self._opened.extend(executor.submit(self._open) for _ in range(ahead))
            executor.shutdown(wait=False)

    def take(self) -> TokenizerWrapper:
        """The next of them, or a new one. Raises what upstream raises."""
        try:
            future = self._opened.popleft()
        except IndexError:
            return self._open()
        return future.result()

    def _open(self) -> TokenizerWrapper:
        return open_tokenizer(self._folder, self._config.end_tokens)
