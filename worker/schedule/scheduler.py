"""Who runs in this step. Plain Python, deterministic: no MLX, no clock, measured times are handed in.

Each step decodes every started row, then spends on prompts what time the running streams can spare. The order
is that of priority, then of arrival. What must always hold: a request is in exactly one phase; at most
`rows_max` run; what rows have reserved is at most `bytes_max`; nobody takes a place or bytes that someone
before them waits for. A preempted row waits where it stood before.

Short prompts for which there is no place yet run along with one that is begun: a call with several costs
little more. At most `AHEAD_MAX` rows wait with such a prompt in their caches, and give way first.

Where the first in line has an image next that is not kept, the step encodes that image and runs no prompt: so
the streams wait for one image at a time, and no longer than it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from protocol.errors import RequestError, too_long
from protocol.parts import ImageStatus
from worker.contract import Prepared
from worker.pictures import Picture
from worker.prefixes.index import Match, PrefixIndex
from worker.schedule.gallery import Gallery, pictures_of
from worker.schedule.gathering import gathers
from worker.schedule.groups import begin_of, form_groups, is_short, leads_of
from worker.schedule.ledger import Ledger
from worker.schedule.pace import Pace, Work
from worker.schedule.rows import Chunk, Group, Look, Phase, Plan, Row, work_of
from worker.schedule.sharing import SHORT_TOKENS_MAX, Sharing

AHEAD_MAX = 7
_SETTLING_STEPS = 2


@dataclass(frozen=True, slots=True)
class Policy:
    """What the scheduler keeps to. `bytes_max`: for caches; `image_bytes_max`: beside those, for encoded
    images. `row_bytes`: what the caches of a row of so many tokens take."""

    rows_max: int
    prefill_tokens: int = 2048
    inter_token_target_s: float = 0.1
    bytes_max: int | None = None
    row_bytes: Callable[[int], int] = lambda tokens: 0
    image_bytes_max: int | None = None


class Scheduler:
    """The rows of one worker."""

    def __init__(self, policy: Policy, prefixes: PrefixIndex | None = None) -> None:
        """`prefixes`: what is stored; None: nothing is reused."""
        self._policy = policy
        self._sharing = None if prefixes is None else Sharing(prefixes)
        self._pace = Pace(target_s=policy.inter_token_target_s, tokens_max=policy.prefill_tokens)
        self._gallery = Gallery(policy.image_bytes_max)
        self._arrivals = itertools.count()
        self._rows: dict[str, Row] = {}
        self._in: dict[Phase, dict[str, Row]] = {phase: {} for phase in Phase}
        self._deadlines: dict[str, float] = {}
        self._ledger = Ledger(policy.bytes_max, policy.row_bytes)
        self._next: Sequence[Row] = ()
        """Who was in line when it was last planned."""
        self._settling = 0
        self._lap_at = self._first_at = 0.0
        self._work = Work()
        self._looks = False

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    @property
    def is_full(self) -> bool:
        """Whether one more row would have to wait."""
        return len(self._rows) >= self._policy.rows_max

    @property
    def decodes(self) -> bool:
        """Whether rows that are started are to decode."""
        started = self._in[Phase.DECODE].values()
        if not started or any(row.answered for row in started):
            return bool(started)
        coming = [row for row in self._next if row.id in self._rows and row.phase is not Phase.DECODE]
        return not gathers(coming, self._pace, self._lap_at - self._first_at)

    @property
    def decoding(self) -> list[Row]:
        """The rows that are started."""
        return list(self._in[Phase.DECODE].values())

    def count(self, *phases: Phase) -> int:
        """How many rows stand in one of `phases`."""
        return sum(len(self._in[phase]) for phase in phases)

    def get(self, id: str) -> Row | None:
        return self._rows.get(id)

    # --- coming and going ---

    def add(self, request: Prepared, now: float, *, sparse: bool = False) -> Row:
        """A request joins its queue. Raises `RequestError` for one that could never run. `sparse`: parts of
        its prompt are to be left out; it shares nothing with others."""
        if request.id in self._rows:
            raise ValueError(f"row {request.id} is there already")
        tokens = request.tokens + request.resume  # the same tuple, where nothing was answered
        if self._ledger.needs(len(tokens)) > self._ledger.bytes_max:
            raise self._too_long(len(tokens), request.source)
        self._gallery.check(request)
        number = next(self._arrivals)
        digest = hash(tokens)
        asks = request.echo and request.draw.logprobs is not None
        scored = request.scored if asks else len(request.tokens)
        row = Row(
            request=request,
            order=(request.priority, number),
            family=number if sparse else self._family(tokens, digest, number, scored),
            digest=digest,
            tokens=tokens,
            length=len(tokens),
            answered=list(request.resume),
            scored=scored,
            pictures=pictures_of(request),
            sparse=sparse,
        )
        self._rows[row.id] = self._in[Phase.WAITING][row.id] = row
        if self._sharing:
            self._sharing.begin(row)
        if request.deadline_s is not None:
            self._deadlines[row.id] = now + request.deadline_s
        return row

    def drop(self, id: str) -> Row | None:
        """The one place where a row leaves, for whatever reason. Idempotent."""
        row = self._rows.pop(id, None)
        if row is not None:
            del self._in[row.phase][id]
            self._deadlines.pop(id, None)
            self._ledger.release(row)
            self._ledger.forget()
            if self._sharing:
                self._sharing.end(row)
        return row

    def overdue(self, now: float) -> list[Row]:
        """Rows whose deadline has passed."""
        return [self._rows[id] for id, deadline in self._deadlines.items() if deadline <= now]

    def _family(self, tokens: tuple[int, ...], digest: int, number: int, scored: int) -> int:
        # A prompt of one token needs no prefill that could be shared. What one finds out of its prompt is
        # told to all of its family, so they begin with the same.
        if len(tokens) > 1:
            for row in self._of(Phase.PREFILL, Phase.AHEAD, Phase.WAITING):
                if (row.digest, row.scored, row.sparse) == (digest, scored, False) and row.tokens == tokens:
                    return row.family
        return number

    def _too_long(self, tokens: int, source: str) -> RequestError:
        return too_long(self._ledger.tokens_max(tokens), tokens, source, by_memory=True)

    # --- what has happened ---

    def ran(self, group: Group) -> None:
        """The chunks of a group are in their rows' caches."""
        self._work = self._work.plus(work_of(group))
        for chunk in group:
            self._gallery.ran(chunk)
            chunk.row.prefilled = chunk.row.beyond(chunk.begin + len(chunk.tokens))

    def anew(self, chunk: Chunk) -> Chunk:
        """The caches of a chunk's row are lost: all of it up to where the chunk ends."""
        tokens = chunk.row.tokens[: chunk.begin + len(chunk.tokens)]
        chunk.row.prefilled = 0
        return replace(chunk, tokens=tokens)

    def looked(self, row: Row, picture: Picture, nbytes: int) -> list[str]:
        """An image was encoded for a row, and so many bytes are kept of it. The digests of what must go."""
        return self._gallery.encoded(row, picture, nbytes)

    def forget_images(self) -> tuple[list[str], int]:
        """Keep none but those that are needed now: the digests of the others, and their bytes."""
        return self._gallery.clear(self._of(Phase.PREFILL))

    @property
    def image_status(self) -> ImageStatus | None:
        """What is kept of images; None where there is no memory for any."""
        return self._gallery.status() if self._policy.image_bytes_max != 0 else None

    def release(self, id: str) -> None:
        """What a row was held for is there, or will not come. Unknown rows are no error."""
        if row := self._rows.get(id):
            row.held = False

    def started(self, row: Row) -> None:
        """The row has joined the batch."""
        self._first_at = self._first_at if self._in[Phase.DECODE] else self._lap_at
        self._move(row, Phase.DECODE)

    def lap(self, now: float, *, decoded: bool | None) -> None:
        """What was run since the last lap is done now, and so is a decode step, if `decoded`.

        With streams running, a lap is what they wait from token to token. None: nothing is to be learned, as
        from a lap in which an image was encoded.
        """
        if decoded is not None and not self._looks:
            self._pace.learn(now - self._lap_at, decoded=decoded, work=self._work)
        self._lap_at, self._work, self._looks = now, Work(), False

    def disturb(self) -> None:
        """Nothing is to be learned from the lap that is under way."""
        self._looks = True

    @property
    def decode_s(self) -> float:
        """What a decode step takes, as far as is known."""
        return self._pace.decode_s

    def answered(self, row: Row, token: int) -> bool:
        """A token of its answer. False: there is no memory for another one even if the row were alone."""
        row.answered.append(token)
        row.length += 1
        return row.length < row.roof or self._ledger.reserve(row)

    def miss(self, row: Row) -> str:
        """Why no more of a row's prompt is reused, in the words of `protocol.messages.Reuse`."""
        return "off" if self._sharing is None else self._sharing.miss(row)

    def relatives(self, row: Row) -> list[Row]:
        """The rows of its family that have not started, itself among them."""
        return [
            other
            for other in self._of(Phase.PREFILL, Phase.AHEAD, Phase.WAITING)
            if other.family == row.family
        ]

    def spare(self, cache_bytes: int) -> int | None:
        """Bytes that no row needs now; None where nothing is limited."""
        return self._ledger.spare(cache_bytes)

    def rewind(self) -> None:
        """Every cache was lost: prefills begin anew. Started rows must have been dropped."""
        for row in self._of(Phase.PREFILL, Phase.AHEAD):
            row.prefilled = 0

    # --- what is next ---

    def plan(self, cache_bytes: int = 0) -> Plan:
        """What to run before the next decode step. `cache_bytes`: what all caches really take."""
        preempted = self._make_room(cache_bytes)
        line, behind = self._line(cache_bytes, preempted)
        self._next = line
        if not line:
            return Plan(preempted=preempted)
        heads = self._heads(line, behind)
        if look := self._look(line, heads):
            return Plan(self._begin(look.row, heads[look.row]), preempted, look)
        return Plan(self._fill(line, behind, heads), preempted)

    def _line(self, cache_bytes: int, preempted: list[Row]) -> tuple[list[Row], list[Row]]:
        """Rows in prefill and those that may join them now, in order; and who could run ahead with them.

        A row joins rows that run only if each of them can grow by a block, or it would soon be preempted.
        One that is held is passed over.
        """
        admitted = self.count(Phase.PREFILL, Phase.DECODE)
        line = list(self._in[Phase.PREFILL].values())
        places = self._policy.rows_max - admitted
        behind: list[Row] = []
        if places > 0 and (ready := [row for row in self._of(Phase.AHEAD, Phase.WAITING) if not row.held]):
            ready.sort(key=_order)
            free = self._ledger.free(cache_bytes) - admitted * self._ledger.block_bytes
            for row in ready[:places]:
                free -= self._ledger.needs(row.length) - row.bytes
                while free < 0 and (last := self._last_ahead(row)):
                    free += last.bytes
                    preempted.append(self._preempt(last))
                if free < 0 and (admitted or line):
                    break
                line.append(row)
                free -= self._ledger.block_bytes
            else:
                behind = self._behind(ready[places:], free)
        line.sort(key=_order)
        return line, behind

    def _behind(self, rows: list[Row], free: float) -> list[Row]:
        """Rows without a place whose prompts could be run now, in order. Nobody overtakes one that cannot."""
        behind: list[Row] = []
        room = AHEAD_MAX - sum(row.prefilled > 0 for row in self._in[Phase.AHEAD].values())
        for row in rows:
            if row.prefilled:
                continue
            free -= self._ledger.needs(row.length) - row.bytes + self._ledger.block_bytes
            if len(behind) == room or free < 0 or row.family != row.order[1] or not is_short(row, None):
                break
            behind.append(row)
        return behind

    def _last_ahead(self, first: Row) -> Row | None:
        """The last of those that wait with a prompt in their caches, if it is behind `first`."""
        last = max(self._in[Phase.AHEAD].values(), key=_order, default=first)
        return last if last.order > first.order else None

    def _heads(self, line: list[Row], behind: list[Row]) -> dict[Row, Match | None]:
        """The rows that run for their families, in order, each with the stored prefix it begins with."""
        leads = leads_of(line)
        heads = [*leads.values(), *(row for row in behind if row.family not in leads)]
        begun = [row for row in self._of(Phase.PREFILL) if row.prefilled]
        return self._sharing.ready(heads, begun) if self._sharing else dict.fromkeys(heads)

    def _look(self, line: list[Row], heads: Mapping[Row, Match | None]) -> Look | None:
        """What has to be encoded before the first row can be run any further."""
        first, match = next(iter(heads.items()), (None, None))
        if first is None or first not in line:
            return None
        begin = begin_of(first, match)
        picture = self._gallery.missing(first, begin)
        if picture is None or picture.first > begin:
            return None
        self._looks = True
        prefilling = [*self._of(Phase.PREFILL), first]
        return Look(first, picture, self._gallery.make_room(picture.nbytes, prefilling))

    def _begin(self, row: Row, match: Match | None) -> list[Group]:
        """What a row that waits for a look does before: it takes its place, and what is stored of it."""
        self._admit([row], Phase.PREFILL)
        return [[Chunk(row, (), last=False, match=match)]] if match or not row.reuse else []

    def _fill(self, line: list[Row], behind: list[Row], heads: Mapping[Row, Match | None]) -> list[Group]:
        """The groups of one plan. Rows that get a chunk are admitted, those of `behind` to run ahead."""
        budget = self._pace.budget(decoding=self.decodes and not self._catches_up(line))
        groups = form_groups(line, heads, budget, self._gallery)
        for chunk in itertools.chain.from_iterable(groups):
            rows = (chunk.row, *chunk.copies)
            self._admit(rows, Phase.AHEAD if chunk.row in behind else Phase.PREFILL)
        return groups

    def _catches_up(self, line: Sequence[Row]) -> bool:
        """Whether streams of a worker that has died are next, and nobody else runs. All of them have been
        without a token for longer than the target, and those that go on already hold up the others."""
        if not line or not line[0].request.resume or line[0].left > SHORT_TOKENS_MAX:
            return False
        return all(row.request.resume for row in self._of(Phase.DECODE))

    def _admit(self, rows: Sequence[Row], phase: Phase) -> None:
        for row in rows:
            if row.phase is not phase:
                self._move(row, phase)
                self._ledger.reserve(row)

    # --- bytes ---

    def _make_room(self, cache_bytes: int) -> list[Row]:
        """Preempt until what is reserved fits. The last row stays: alone it fits."""
        preempted: list[Row] = []
        ledger = self._ledger
        self._settling = max(0, self._settling - 1)
        # What caches really take may be more than was reserved, and falls a step or two behind.
        surprised = cache_bytes > ledger.bytes_max and not self._settling
        if surprised:
            ledger.learn(cache_bytes)
        while self.count(Phase.AHEAD, Phase.PREFILL, Phase.DECODE) > 1 and (
            ledger.reserved > ledger.bytes_max or surprised
        ):
            running = self._of(Phase.PREFILL, Phase.DECODE)
            preempted.append(self._preempt(max(self._of(Phase.AHEAD) or running, key=_order)))
            self._settling, surprised = 1 + _SETTLING_STEPS, False
        return preempted

    def _preempt(self, row: Row) -> Row:
        """It loses its cache, and keeps its answer and its place in line."""
        self._move(row, Phase.WAITING)
        self._ledger.release(row)
        row.prefilled = 0
        row.preemptions += 1
        if row.answered:
            row.tokens = (*row.request.tokens, *row.answered)
            row.family, row.digest = next(self._arrivals), hash(row.tokens)
        if self._sharing:
            self._sharing.end(row)
        return row

    def _of(self, *phases: Phase) -> list[Row]:
        return [row for phase in phases for row in self._in[phase].values()]

    def _move(self, row: Row, phase: Phase) -> None:
        del self._in[row.phase][row.id]
        row.phase = phase
        self._in[phase][row.id] = row


def _order(row: Row) -> tuple[int, int]:
    return row.order
