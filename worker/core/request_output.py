"""Output state of a request in the loop: output processor, counts and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol import types
from protocol.types import Delta, PromptToken, RequestStatus, Timings, Usage
from worker.core.rows import Row
from worker.interfaces import OutputProcessor
from worker.values import Logprob, OutputDelta, SampledToken


@dataclass(slots=True)
class RequestOutput:
    """Answer of one request so far. Times are those of the loop's clock."""

    row: Row
    output_processor: OutputProcessor
    submitted_at: float
    prefill_at: float | None = None
    decode_at: float | None = None
    first_token_at: float | None = None
    sequence: int = 0
    accepted: int = 0
    rejected: int = 0

    def tried(self, right: int, wrong: int) -> None:
        """Count accepted (`right`) and rejected (`wrong`) draft tokens."""
        self.accepted += right
        self.rejected += wrong

    def replay(self) -> str | None:
        """Replay the tokens that a lost worker answered. Return the finish reason if the answer has ended.

        It has also ended if nothing is to be generated.
        """
        reason = "length" if self.row.request.max_tokens == 0 and self.row.is_scored else None
        for count, token in enumerate(self.row.request.resume, start=1):
            _, reason = self._advance(token, count, fits=True)
        return reason

    def gain(self, run: Sequence[SampledToken], answered: Callable[[int], bool]) -> tuple[Delta, str | None]:
        """Process sampled tokens up to the end of the answer. Return their delta and any finish reason.

        `answered`: records a token, and returns whether there is memory for more.
        """
        request = self.row.request
        tokens: list[int] = []
        reported: list[types.TokenLogprob] = []
        grown, reason = OutputDelta(), None
        for token, likelihood in run:
            fits = answered(token)
            growth, reason = self._advance(token, len(self.row.answered), fits=fits)
            tokens.append(token)
            grown = growth if len(tokens) == 1 else grown.then(growth)
            # End tokens are not part of an answer, and only the worker knows them. With `echo` they are
            # reported: clients that score texts expect a token more than the prompt has.
            is_shown = growth.is_content and (request.echo or token not in request.end_tokens)
            if likelihood is not None and is_shown:
                reported.append(self._spell(token, likelihood))
            if reason is not None:
                break
        delta = Delta(
            id=request.id,
            sequence=self.sequence,
            tokens=tokens,
            text=grown.text,
            reasoning=grown.reasoning,
            likelihoods=reported,
            calls=list(grown.calls),
        )
        self.sequence += 1
        return delta, reason

    def _advance(self, token: int, count: int, *, fits: bool) -> tuple[OutputDelta, str | None]:
        request, output_processor = self.row.request, self.output_processor
        if token in request.end_tokens:
            return output_processor.flush(has_ended=True), self._own_end()
        growth = output_processor.push(token)
        if output_processor.stopped:
            return growth, self._own_end()
        if count >= request.max_tokens or not fits:
            return growth.then(output_processor.flush()), "length"
        return growth, None

    def _own_end(self) -> str:
        return "tool_calls" if self.output_processor.has_called else "stop"

    def _spell(self, token: int, likelihood: Logprob) -> types.TokenLogprob:
        spell = self.output_processor.spell
        return types.TokenLogprob(
            bytes=spell(token),
            logprob=likelihood.logprob,
            top=[(spell(other), logprob) for other, logprob in likelihood.top],
        )

    def spell_prompt(self, token: int, likelihood: Logprob | None) -> PromptToken:
        """Return a prompt token with as many of the most likely tokens as this request asks for.

        `likelihood`: None for the first token of the prompt.
        """
        spell = self.output_processor.spell
        if likelihood is None:
            return PromptToken(bytes=spell(token))
        asked = likelihood.top[: self.row.request.sampling.logprobs]
        return PromptToken(
            bytes=spell(token),
            logprob=likelihood.logprob,
            top=[(spell(other), logprob) for other, logprob in asked],
        )

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.row.request.tokens),
            completion_tokens=len(self.row.answered),
            cached_tokens=self.row.reuse.tokens if self.row.reuse else 0,
            sparse_tokens=sum(last - first for first, last in self.row.left_out),
            reasoning_tokens=self.output_processor.reasoning_tokens,
            accepted_tokens=self.accepted,
            rejected_tokens=self.rejected,
        )

    def status(self, now: float) -> RequestStatus:
        row = self.row
        return RequestStatus(
            id=row.id,
            phase=row.phase,
            prompt_tokens=len(row.request.tokens),
            prefilled=min(row.prefilled, len(row.request.tokens)),
            answered=len(row.answered),
            seconds=now - self.submitted_at,
            first_token_s=self.first_token_at and self.first_token_at - self.submitted_at,
            reuse=row.reuse,
            preemptions=row.preemptions,
            work=row.scoring_passes + row.scored + row.images_counted_upto + len(row.encoded_for_row),
        )

    def timings(self, now: float) -> Timings:
        prefill_at = self.prefill_at or now
        decode_at = self.decode_at or now
        return Timings(
            queued_s=prefill_at - self.submitted_at,
            prefill_s=decode_at - prefill_at,
            decode_s=now - decode_at,
        )
