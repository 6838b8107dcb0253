"""What the model thread reports: output, usage and times of requests, and the counters of the heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from protocol import types
from protocol.errors import RequestError
from protocol.messages import (
    AdaptersChanged,
    CacheCleared,
    EmbeddingChunk,
    Finished,
    Message,
    PrefixHit,
    PromptLogprobs,
    StepOutputs,
    failed,
)
from protocol.types import (
    AdapterInfo,
    Delta,
    ImageStatus,
    PrefixReuse,
    PrefixStatus,
    PromptToken,
    RequestStatus,
    Resources,
    SpecDecodeStatus,
    Timings,
    Usage,
)
from worker.core.rows import Row
from worker.interfaces import OutputProcessor
from worker.values import Logprob, OutputDelta, SampledToken


def processor_of(row: Row) -> OutputProcessor:
    """Return the output processor of a request."""
    assert row.output_processor is not None, "opened when the request comes"
    return row.output_processor


def replay(row: Row) -> str | None:
    """Replay the tokens that a lost worker answered. Return the finish reason if the answer has ended.

    It has also ended if nothing is to be generated.
    """
    reason = "length" if row.request.max_tokens == 0 and row.is_scored else None
    for count, token in enumerate(row.request.resume, start=1):
        _, reason = _advance(row, token, count, fits=True)
    return reason


def gain(row: Row, run: Sequence[SampledToken], answered: Callable[[int], bool]) -> tuple[Delta, str | None]:
    """Process sampled tokens up to the end of the answer. Return their delta and any finish reason.

    `answered`: records a token, and returns whether there is memory for more.
    """
    request = row.request
    tokens: list[int] = []
    reported: list[types.TokenLogprob] = []
    grown, reason = OutputDelta(), None
    for token, likelihood in run:
        fits = answered(token)
        growth, reason = _advance(row, token, len(row.answered), fits=fits)
        tokens.append(token)
        grown = growth if len(tokens) == 1 else grown.then(growth)
        # End tokens are not part of an answer, and only the worker knows them. With `echo` they are
        # reported: clients that score texts expect a token more than the prompt has.
        is_shown = growth.is_content and (request.echo or token not in request.end_tokens)
        if likelihood is not None and is_shown:
            reported.append(_spell(row, token, likelihood))
        if reason is not None:
            break
    delta = Delta(
        id=request.id,
        sequence=row.sequence,
        tokens=tokens,
        text=grown.text,
        reasoning=grown.reasoning,
        likelihoods=reported,
        calls=list(grown.calls),
    )
    row.sequence += 1
    return delta, reason


def _advance(row: Row, token: int, count: int, *, fits: bool) -> tuple[OutputDelta, str | None]:
    request, output_processor = row.request, processor_of(row)
    if token in request.end_tokens:
        return output_processor.flush(has_ended=True), _own_end(row)
    growth = output_processor.push(token)
    if output_processor.stopped:
        return growth, _own_end(row)
    if count >= request.max_tokens or not fits:
        return growth.then(output_processor.flush()), "length"
    return growth, None


def _own_end(row: Row) -> str:
    return "tool_calls" if processor_of(row).has_called else "stop"


def _spell(row: Row, token: int, likelihood: Logprob) -> types.TokenLogprob:
    spell = processor_of(row).spell
    return types.TokenLogprob(
        bytes=spell(token),
        logprob=likelihood.logprob,
        top=[(spell(other), logprob) for other, logprob in likelihood.top],
    )


def spell_prompt(row: Row, token: int, likelihood: Logprob | None) -> PromptToken:
    """Return a prompt token with as many of the most likely tokens as this request asks for.

    `likelihood`: None for the first token of the prompt.
    """
    spell = processor_of(row).spell
    if likelihood is None:
        return PromptToken(bytes=spell(token))
    asked = likelihood.top[: row.request.sampling.logprobs]
    return PromptToken(
        bytes=spell(token),
        logprob=likelihood.logprob,
        top=[(spell(other), logprob) for other, logprob in asked],
    )


def usage_of(row: Row) -> Usage:
    """Return the usage of a request so far."""
    return Usage(
        prompt_tokens=len(row.request.tokens),
        completion_tokens=len(row.answered),
        cached_tokens=row.reuse.tokens if row.reuse else 0,
        sparse_tokens=sum(last - first for first, last in row.left_out),
        reasoning_tokens=processor_of(row).reasoning_tokens,
        accepted_tokens=row.accepted,
        rejected_tokens=row.rejected,
    )


def status_of(row: Row, now: float) -> RequestStatus:
    """Return the status of a request for the heartbeat."""
    return RequestStatus(
        id=row.id,
        phase=row.phase,
        prompt_tokens=len(row.request.tokens),
        prefilled=min(row.prefilled, len(row.request.tokens)),
        answered=len(row.answered),
        seconds=now - row.submitted_at,
        first_token_s=row.first_token_at and row.first_token_at - row.submitted_at,
        reuse=row.reuse,
        preemptions=row.preemptions,
        work=row.scoring_passes + row.scored + row.images_counted_upto + len(row.encoded_for_row),
    )


def timings_of(row: Row, now: float) -> Timings:
    """Return the times of a request that ends now."""
    prefill_at = row.prefill_at or now
    decode_at = row.decode_at or now
    return Timings(
        queued_s=prefill_at - row.submitted_at,
        prefill_s=decode_at - prefill_at,
        decode_s=now - decode_at,
    )


PART_TOKENS_MAX = 1024
"""Maximum tokens per message with prompt logprobs, which is then some hundred kilobytes."""
TOLD_EVERY_S = 0.2
"""Interval in seconds at which the status of each row is refreshed."""


def logprobs_of(row: Row, likelihoods: Sequence[Logprob]) -> list[Logprob | None]:
    """Return the new logprobs of a prompt's next tokens. The very first token has none."""
    beginning: list[Logprob | None] = [None] if row.scored == 0 else []
    left = len(row.request.tokens) - row.scored
    return [*beginning, *likelihoods][:left]


def parts_of(row: Row, known: Sequence[Logprob | None]) -> Iterator[tuple[int, list[PromptToken]]]:
    """Yield one row's messages: the index of the first token, and the tokens with their logprobs."""
    begin = row.scored
    tokens = row.request.tokens[begin : begin + len(known)]
    for at in range(0, len(known), PART_TOKENS_MAX):
        part = slice(at, at + PART_TOKENS_MAX)
        yield begin + at, list(map(partial(spell_prompt, row), tokens[part], known[part]))


@dataclass(slots=True)
class Counters:
    """Counters that the model thread writes and the heartbeat reads. Values are replaced whole: no lock."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Number of steps that ran something."""
    starved: int = 0
    """Number of times a row made no progress."""
    cache_bytes: int = 0
    rows: list[RequestStatus] = field(default_factory=list)
    prefix: PrefixStatus | None = None
    device: Resources = field(default_factory=Resources)
    images: ImageStatus | None = None
    drafts: SpecDecodeStatus | None = None


@dataclass(frozen=True, slots=True)
class Publisher:
    """Publisher of one worker. `publish` passes a message to the I/O thread; `backlog` counts its queue."""

    incarnation: str
    publish: Callable[[Message], None]
    backlog: Callable[[], int]

    def reused(self, id: str, reuse: PrefixReuse) -> None:
        """Publish how much of a request's prompt was reused."""
        self.publish(PrefixHit(incarnation=self.incarnation, id=id, reuse=reuse))

    def scored(self, id: str, first: int, tokens: list[PromptToken]) -> None:
        """Publish prompt logprobs, from token index `first` on."""
        self.publish(PromptLogprobs(incarnation=self.incarnation, id=id, first=first, tokens=tokens))

    def events(self, deltas: list[Delta]) -> None:
        """Publish the output deltas of a step."""
        self.publish(StepOutputs(incarnation=self.incarnation, deltas=deltas))

    def encoded(self, id: str, sequence: int, places: list[int], vectors: bytes) -> None:
        """Publish the vectors of some of a request's texts."""
        self.publish(
            EmbeddingChunk(
                incarnation=self.incarnation, id=id, sequence=sequence, places=places, vectors=vectors
            )
        )

    def encoded_all(self, id: str, usage: Usage, timings: Timings) -> None:
        """Publish that all texts of a request are encoded."""
        self.publish(
            Finished(incarnation=self.incarnation, id=id, reason="stop", usage=usage, timings=timings)
        )

    def finished(self, row: Row, reason: str, now: float) -> None:
        """Publish that an answer is complete."""
        self.publish(
            Finished(
                incarnation=self.incarnation,
                id=row.id,
                reason=reason,
                usage=usage_of(row),
                timings=timings_of(row, now),
                stop=processor_of(row).stop_string,
            )
        )

    def failed(self, id: str, error: RequestError) -> None:
        """Publish that a request failed."""
        self.publish(failed(self.incarnation, id, error))

    def adapters_changed(self, name: str, error: str, adapters: Sequence[AdapterInfo]) -> None:
        """Publish that an adapter was loaded or removed, or why not, and all that there are."""
        self.publish(
            AdaptersChanged(incarnation=self.incarnation, name=name, error=error, adapters=list(adapters))
        )

    def cleared(self, id: str, ram_bytes: int, disk_bytes: int, namespace: str = "") -> None:
        """Publish the bytes freed by the cache clear with this id."""
        self.publish(
            CacheCleared(
                incarnation=self.incarnation,
                id=id,
                ram_bytes=ram_bytes,
                disk_bytes=disk_bytes,
                namespace=namespace,
            )
        )
