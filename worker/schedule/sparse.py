"""Which parts of a long prompt are run, where its request lets others be left out (SpecPrefill, arXiv
2502.02789). Pure: seconds are handed in.

A small network reads the prompt and tells how much each token matters to what it would say next. Run are then
the beginning with the system prompt and tools, the end, and of the rest the chunks that matter most. It reads
between the steps of others, a chunk at a time, as prompts are run; a row is held until it has been weighed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from protocol.errors import Code, RequestError
from protocol.parts import Sparse
from worker.contract import Prepared
from worker.drafts import Weigher
from worker.schedule.pace import Pace, Work
from worker.schedule.rows import Row, Span

CHUNK_TOKENS = 32
HEAD_TOKENS, TAIL_TOKENS = 64, 256
"""Always run: at the beginning, where no system prompt is longer, and at the end."""
WHOLE_TOKENS = HEAD_TOKENS + CHUNK_TOKENS + TAIL_TOKENS
"""Of a prompt of no more there is nothing to leave out."""
READ_TOKENS_MAX = 2048
SMOOTHED_TOKENS = 13
"""What is looked at says something of its neighbours, too; as in the paper."""


class Thinning:
    """The rows of one worker of which parts are to be left out. `default`: what a request wants that says
    nothing."""

    def __init__(
        self,
        weigher: Weigher | None = None,
        default: Sparse | None = None,
        *,
        is_able: bool = False,
        target_s: float = 0.1,
        tokens_max: int = READ_TOKENS_MAX,
    ) -> None:
        """`weigher`: None: nobody can tell what matters. `is_able`: parts of a prompt can be left out at all.
        `target_s`: between two tokens of a running stream. `tokens_max`: read at once."""
        self._known_weigher = weigher
        self._is_able = is_able
        self._default = default
        self._pace = Pace(target_s=target_s, tokens_max=min(tokens_max, READ_TOKENS_MAX))
        self._rows: dict[str, tuple[Row, Sparse]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def wish(self, request: Prepared) -> Sparse | None:
        """What is to be kept of a request's prompt; None: all of it. Raises `RequestError` for what the
        request wants and cannot have."""
        wish = request.sparse or self._default
        if request.left_out:
            self._require(self._is_able, "This model's layers do not allow that.")
            return wish or Sparse(keep=1.0)
        if wish is None or wish.keep >= 1 or len(request.tokens) <= max(wish.above, WHOLE_TOKENS):
            return None
        is_plain = not request.pictures and not (request.echo and request.draw.logprobs is not None)
        if request.sparse is None and not (is_plain and self._is_able and self._known_weigher):
            return None
        self._require(
            is_plain, "Prompts with images, and those whose log-probabilities are asked, are run whole."
        )
        self._require(self._is_able, "This model's layers do not allow that.")
        self._require(
            self._known_weigher, "It takes a draft model with attention: start the server with --draft-model."
        )
        return wish

    @property
    def _weigher(self) -> Weigher:
        assert self._known_weigher is not None, "rows are held only for one that is there"
        return self._known_weigher

    @staticmethod
    def _require(possible: object, otherwise: str) -> None:
        if not possible:
            wording = f"No part of the prompt can be left out here. {otherwise}"
            raise RequestError(Code.INVALID_REQUEST, wording, param="sparse_prefill")

    def hold(self, row: Row, wish: Sparse) -> None:
        """It is to be weighed, if that was not done before."""
        row.sparse = True
        if row.request.left_out:
            leave_out(row, row.request.left_out)
        else:
            row.held = True
            self._rows[row.id] = row, wish

    def drop(self, id: str) -> None:
        """A row has gone. Unknown ones are no error."""
        self._rows.pop(id, None)

    @property
    def first(self) -> Row:
        """The row whose turn it is."""
        return next(iter(self._rows.values()))[0]

    def read(self, row: Row, clock: Callable[[], float], decode_s: float) -> bool:
        """Have a chunk of a row's prompt read, or a part of the weighing done. Whether that was the last, and
        what is left out is known. `decode_s`: what is waited for the decode step that is under way; 0: there
        is none."""
        weigher, prompt = self._weigher, row.request.tokens[:-1]
        done, began = weigher.length(row.id), clock()
        if done < len(prompt):
            self._pace.decode_s = decode_s
            count = self._pace.budget(decoding=decode_s > 0).cut(len(prompt) - done, done)
            weigher.read(row.id, prompt[done : done + count])
            self._pace.learn(clock() - began, decoded=decode_s > 0, work=Work.call(1, count, done))
            return False
        weights = weigher.weigh(row.id, row.request.tokens[-1])
        if weights is None:
            return False
        self._choose(row, weights)
        return True

    def _choose(self, row: Row, weights: Sequence[float]) -> None:
        _, wish = self._rows.pop(row.id)
        boundaries = row.request.boundaries
        # The last boundary is where later turns are the same: about all of the prompt.
        dense = boundaries[0] if len(boundaries) > 1 else 0
        self._weigher.drop(row.id)  # for a row with gaps nothing is drafted
        leave_out(row, least(weights, wish.keep, dense))


def leave_out(row: Row, spans: Sequence[Span]) -> None:
    """Of a row that has not begun."""
    row.left_out = tuple(spans)
    row.cuts = [first for first, _ in spans]


def least(weights: Sequence[float], keep: float, dense: int) -> list[Span]:
    """The spans of a prompt that matter least, as many as need not be kept, in order. `weights`: of all of
    its tokens but the last. `dense`: it is run up to there whatever else."""
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
    """The mean of each weight and its neighbours."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    half, count = SMOOTHED_TOKENS // 2, len(weights)
    edges = [(max(0, at - half), min(count, at + half + 1)) for at in range(count)]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in edges]
