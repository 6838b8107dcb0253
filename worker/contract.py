"""What the service and the loop ask of a model, and the values that pass between them.

`worker/models` and `worker/engine` answer on MLX, `worker/fake` from a script. Nothing here imports MLX, and
only plain Python values cross: arrays never leave the model thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Capabilities, Generate

Progress = Callable[[int, int], None]
"""Called while a model loads with (bytes of weights done, bytes in all), on the model thread."""


class ModelError(Exception):
    """A model that cannot be loaded, in words for the person who asked for it. Trying again is no help."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one request's tokens are drawn, every choice made. Temperature 0 is greedy.

    `top_p` 1, `top_k` 0 and `min_p` 0 are off. The token at a position depends on `seed` and the position.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the model thread takes it: rendered, tokenized, every default filled in.

    `max_tokens` is at least 1 and fits the context. `end_tokens` is empty when the request ignores them.
    """

    id: str
    tokens: tuple[int, ...]
    draw: Draw
    stop: tuple[str, ...]
    max_tokens: int
    end_tokens: frozenset[int]


class Preparer(Protocol):
    """Template and tokenizer. Owned by one thread of the pool; never shared, never near MLX."""

    def prepare(self, request: Generate, media: Sequence[bytes]) -> Prepared:
        """Raises `protocol.errors.RequestError` for whatever the request itself causes."""


class Pipeline(Protocol):
    """One request's way from tokens to text. Made with the request and dropped with it."""

    stopped: bool
    """A stop string was met: the text before it has been given out, nothing more will be."""

    def push(self, token: int) -> str:
        """The text this token completes: whole characters only, nothing that may yet become a stop string."""

    def flush(self) -> str:
        """What was held back, once no token follows."""


class Engine(Protocol):
    """Rows of one model. A row is prefilled alone in chunks, then decodes together with all others.

    Used by the model thread only.
    """

    def prefill(self, row: str, tokens: Sequence[int]) -> None:
        """Run a chunk of the row's prompt, all of it but the last token in the end."""

    def start(self, row: str, token: int, position: int, draw: Draw) -> None:
        """The row joins the batch: `token` is the last of its prompt, `position` the index of the first
        token it will draw (the length of its prompt)."""

    def step(self) -> Mapping[str, int]:
        """The next token of every started row. Rows that have ended must be dropped before the next call."""

    def drop(self, row: str) -> None:
        """Forget a row, wherever it stands. Unknown rows are no error."""

    def reset(self) -> None:
        """Forget every row, after a step that failed."""

    def cache_bytes(self) -> int:
        """Bytes held by the caches of all rows."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a loaded model is. `rows_max` None: as many as memory takes; 1: upstream cannot batch it."""

    name: str
    context_length: int
    parameters: int
    capabilities: Capabilities
    rows_max: int | None


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, as its loader hands it over on the model thread."""

    facts: Facts
    engine: Engine
    open_preparer: Callable[[], Preparer]
    """Called once on each thread of the pool."""
    open_pipeline: Callable[[Prepared], Pipeline]
    """Called on the model thread, once for each request."""


class Loader(Protocol):
    """Knows which model to load."""

    name: str
    """The model's name towards clients, known before it is loaded."""

    def load(self, progress: Progress) -> Model:
        """Load and warm up, on the model thread. Raises `ModelError`."""
