"""Batch encoder: runs texts, padded on the right, through an embedding network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from worker.values import Text

Forward = Callable[[mx.array, mx.array, mx.array | None], mx.array]
"""(tokens, mask, types), each int32 [texts, tokens], -> vectors [texts, width]. The mask is 1 at tokens and 0
at padding. `types` None: all 0."""

_TRIAL = (Text((3, 5, 7, 9, 11, 13, 15)), Text((4, 6, 8)))
_ALIKE = 0.02
"""Maximum relative distance between vectors of one text: allows for half precision, not for padding that
leaks."""


class BatchEncoder:
    """`worker.interfaces.Encoder`."""

    def __init__(self, forward: Forward, *, padding: int = 0) -> None:
        """`padding`: the padding token. Probes whether padding changes results; if so, texts of unequal
        length are run separately."""
        self._forward = forward
        self._padding = padding
        self.width = len(self._run(_TRIAL[1:])[0])
        self.is_paddable = self._is_paddable()

    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        found: dict[int, np.ndarray] = {}
        for places in self._groups(texts):
            found |= zip(places, self._run([texts[place] for place in places]), strict=True)
        return [_cut(found[place], text.dimensions).tobytes() for place, text in enumerate(texts)]

    def _groups(self, texts: Sequence[Text]) -> Iterator[list[int]]:
        """Yield the indices of the texts that share a pass."""
        if self.is_paddable:
            yield list(range(len(texts)))
            return
        for length in {len(text.tokens) for text in texts}:
            yield [place for place, text in enumerate(texts) if len(text.tokens) == length]

    def _run(self, texts: Sequence[Text]) -> np.ndarray:
        """Return the vectors, float32 [texts, width]."""
        longest = max(len(text.tokens) for text in texts)
        tokens = _table([text.tokens for text in texts], longest, self._padding)
        mask = _table([(1,) * len(text.tokens) for text in texts], longest, 0)
        has_types = any(text.types for text in texts)
        types = _table([text.types for text in texts], longest, 0) if has_types else None
        vectors = self._forward(tokens, mask, types).astype(mx.float32)
        mx.eval(vectors)
        return np.array(vectors)

    def _is_paddable(self) -> bool:
        together = self._run(_TRIAL)[1]
        alone = self._run(_TRIAL[1:])[0]
        return bool(np.linalg.norm(together - alone) <= _ALIKE * np.linalg.norm(alone))


def _table(rows: Sequence[Sequence[int]], width: int, padding: int) -> mx.array:
    table = np.full((len(rows), width), padding, dtype=np.int32)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return mx.array(table)


def _cut(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    if dimensions is None:
        return vector
    cut = vector[:dimensions]
    return np.asarray(cut / max(float(np.linalg.norm(cut)), 1e-9), dtype="<f4")
