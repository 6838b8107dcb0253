"""Batches of texts through an embedding network: padding, dtypes and dimensions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from worker.runner.encoder import BatchEncoder
from worker.values import Text

TEXTS = [Text((5, 6, 7)), Text((9,)), Text((2, 4, 8, 16, 3)), Text((7, 7, 7))]


class Network:
    """Returns sums of tokens, squares and types; with `sees_padding`, plus the batch's width."""

    def __init__(self, *, sees_padding: bool = False) -> None:
        self.sees_padding = sees_padding
        self.shapes: list[tuple[int, ...]] = []
        self.types: list[mx.array | None] = []

    def __call__(self, tokens: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
        self.shapes.append(tokens.shape)
        self.types.append(types)
        shown = tokens * mask
        width = tokens.shape[1] if self.sees_padding else 0
        typed = mx.zeros_like(tokens) if types is None else types
        columns = [shown.sum(axis=1) + width, (shown * shown).sum(axis=1), typed.sum(axis=1)]
        return mx.stack(columns, axis=1).astype(mx.float16)


def vectors(encoder: BatchEncoder, texts: list[Text]) -> list[list[float]]:
    return [np.frombuffer(vector, dtype="<f4").tolist() for vector in encoder.encode(texts)]


def test_a_network_that_sees_padding_gets_texts_of_equal_length() -> None:
    network = Network(sees_padding=True)
    encoder = BatchEncoder(network)
    assert not encoder.is_paddable
    network.shapes.clear()
    alone = [vectors(encoder, [text])[0] for text in TEXTS]
    assert vectors(encoder, TEXTS) == alone
    assert sorted(network.shapes[4:]) == [(1, 1), (1, 5), (2, 3)]


def test_types_are_passed_and_each_text_is_cut_to_its_own_dimensions() -> None:
    encoder = BatchEncoder(Network())
    typed = [Text((1, 2, 3), (0, 1, 1)), Text((1, 2))]
    assert [vector[2] for vector in vectors(encoder, typed)] == [2, 0]
    *cut, whole = vectors(encoder, [*(Text((3, 4), dimensions=count) for count in (1, 2, 3)), Text((3, 4))])
    assert whole == [7, 25, 0]
    for count, vector in enumerate(cut, start=1):
        expected = np.array(whole[:count]) / np.linalg.norm(whole[:count])
        assert vector == pytest.approx(expected.tolist(), abs=1e-6)
