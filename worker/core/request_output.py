"""Output of a request: deltas, usage, status and times, from its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol import types
from protocol.types import Delta, PromptToken, RequestStatus, Timings, Usage
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
