"""Sparse prefill (SpecPrefill, arXiv 2502.02789): skips unimportant parts of long prompts on request. Pure.

A draft model prefills the prompt and scores the importance of each token for what it would generate next. The
target model then runs the beginning with system prompt and tools, the end, and the most important chunks
between. Scoring runs between the steps of others, a chunk at a time; the row is held meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from protocol.errors import Code, RequestError
from protocol.types import SparsePrefill
from worker.core.prefill import PrefillCall, PrefillCostModel
from worker.core.rows import Row, Span
from worker.interfaces import ImportanceScorer
from worker.values import EngineRequest

_UNABLE = "This model's layers, or its several machines, do not support it."
CHUNK_TOKENS = 32
"""Tokens that are skipped or run together."""
HEAD_TOKENS, TAIL_TOKENS = 64, 256
"""Tokens always run, at the beginning (or the system prompt, if longer) and at the end."""
SMOOTHED_TOKENS = 13
"""Window over which scores are averaged with their neighbors', as in the paper."""


class SparsePrefillQueue:
    """Rows of one worker that wait for importance scoring. `default`: for requests without a setting."""

    def __init__(
        self,
        importance_scorer: ImportanceScorer | None = None,
        default: SparsePrefill | None = None,
        *,
        is_able: bool = False,
        target_s: float = 0.1,
        tokens_max: int = 2048,
    ) -> None:
        """`importance_scorer`: the importance scorer, if any. `is_able`: the model's layers allow skipped
        tokens.

        `target_s`: between two tokens of a running stream. `tokens_max`: the scorer's largest prefill chunk.
        """
        self._known_scorer = importance_scorer
        self._is_able = is_able
        self._default = default
        self._pace = PrefillCostModel(target_s=target_s, tokens_max=tokens_max)
        self.rows: list[Row] = []
        """Those that wait, in order."""

    def _keep_of(self, request: EngineRequest) -> float:
        """Return the share of a request's prompt that is run.

        Raises `RequestError` if the request asks for sparse prefill and it is not possible.
        """
        wish = request.sparse or self._default
        if (
            wish is None
            or wish.keep >= 1
            or len(request.tokens) <= max(wish.above, HEAD_TOKENS + CHUNK_TOKENS + TAIL_TOKENS)
        ):
            return 1.0
        is_plain = not request.images and not (request.echo and request.sampling.logprobs is not None)
        if request.sparse is None and not (is_plain and self._is_able and self._known_scorer):
            return 1.0
        self._require(
            is_plain, "It does not work with images or with log-probabilities of the prompt. Leave it out."
        )
        self._require(self._is_able, _UNABLE)
        self._require(
            self._known_scorer, "It needs a draft model with attention: start the server with --draft-model."
        )
        return wish.keep

    @property
    def _importance_scorer(self) -> ImportanceScorer:
        assert self._known_scorer is not None, "rows are queued only if there is a scorer"
        return self._known_scorer

    @staticmethod
    def _require(possible: object, otherwise: str) -> None:
        if not possible:
            wording = f'"sparse_prefill" is not available for this request. {otherwise}'
            raise RequestError(Code.INVALID_REQUEST, wording, param="sparse_prefill")

    def hold(self, row: Row) -> None:
        """Queue a new row for importance scoring, if parts of its prompt are to be skipped. Raises
        `RequestError` if the request asks for that and it is not possible."""
        if row.request.left_out:  # chosen by an earlier attempt
            self._require(self._is_able, _UNABLE)
            skip_tokens(row, row.request.left_out)
        elif self._keep_of(row.request) < 1:
            skip_tokens(row, ())
            row.is_blocked = True
            self.rows.append(row)

    def drop(self, row: Row) -> None:
        """Forget a row, if it waits."""
        if row in self.rows:
            self.rows.remove(row)

    def read(self, row: Row, clock: Callable[[], float], decode_s: float) -> bool:
        """Run a chunk of the scorer's prefill, or a part of the scoring. Return whether it is complete.

        `decode_s`: expected wait for the decode step in progress; 0 without one.
        """
        for waiting in self.rows:
            waiting.scoring_passes += 1  # counts as progress for all rows in the queue
        importance_scorer, prompt = self._importance_scorer, row.request.tokens[:-1]
        done, began = importance_scorer.length(row.id), clock()
        if done < len(prompt):
            self._pace.decode_s = decode_s
            count = self._pace.budget(decoding=decode_s > 0).chunk_length(len(prompt) - done, done)
            importance_scorer.read(row.id, prompt[done : done + count])
            self._pace.learn(clock() - began, decoded=decode_s > 0, calls=[PrefillCall(count, done)])
            return False
        weights = importance_scorer.score_tokens(row.id, row.request.tokens[-1])
        if weights is None:
            return False
        self._choose(row, weights)
        return True

    def _choose(self, row: Row, weights: Sequence[float]) -> None:
        self.drop(row)
        boundaries = row.request.boundaries
        # The last boundary is that of later turns, and covers nearly the whole prompt.
        dense = boundaries[0] if len(boundaries) > 1 else 0
        self._importance_scorer.drop(row.id)  # sparse rows have no drafts
        skip_tokens(row, least(weights, self._keep_of(row.request), dense))


def skip_tokens(row: Row, spans: Sequence[Span]) -> None:
    """Set the spans to skip of a row that has not begun. Tokens behind them will not have attended to them:
    from now on the row shares nothing with others."""
    row.is_private, row.prompt_group = True, row.queue_key[1]
    row.left_out = tuple(spans)
    row.snapshot_positions = [first for first, _ in spans]


def least(weights: Sequence[float], keep: float, dense: int) -> list[Span]:
    """Return the least important spans of a prompt, in order, so that a share `keep` of it is left to run.

    `weights`: importance of all tokens but the last. `dense`: position up to which no token is skipped.
    """
    count = len(weights)
    first, last = max(dense, HEAD_TOKENS), count - TAIL_TOKENS
    chunks = range(first, last - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    room = keep * count - (count - len(chunks) * CHUNK_TOKENS)
    kept = max(0, math.ceil(room / CHUNK_TOKENS))
    smooth = _smoothed(weights)
    by_weight = sorted(chunks, key=lambda at: -sum(smooth[at : at + CHUNK_TOKENS]))
    spans: list[Span] = []
    for at in sorted(by_weight[kept:]):
        if spans and spans[-1][1] == at:
            spans[-1] = spans[-1][0], at + CHUNK_TOKENS
        else:
            spans.append((at, at + CHUNK_TOKENS))
    return spans


def _smoothed(weights: Sequence[float]) -> list[float]:
    """Return the moving average of the weights."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    half, count = SMOOTHED_TOKENS // 2, len(weights)
    edges = [(max(0, at - half), min(count, at + half + 1)) for at in range(count)]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in edges]
