"""What the loop keeps of one request besides its place in the scheduler: its channels, and its times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol import parts
from protocol.parts import Delta, PromptToken, RowStatus, Timings, Usage
from worker.contract import Drawn, Growth, Likelihood, Pipeline
from worker.schedule.rows import Row


@dataclass(slots=True)
class Answer:
    """One request's answer, as far as it has come. Times are the loop's clock."""

    row: Row
    pipeline: Pipeline
    submitted_at: float
    prefill_at: float | None = None
    decode_at: float | None = None
    first_token_at: float | None = None
    sequence: int = 0
    accepted: int = 0
    rejected: int = 0

    def tried(self, right: int, wrong: int) -> None:
        """So many tokens were drafted for it."""
        self.accepted += right
        self.rejected += wrong

    def replay(self) -> str | None:
        """Go through what another worker has answered and said; why that was the end, if it was, or if there
        is nothing to be said."""
        reason = "length" if self.row.request.max_tokens == 0 and self.row.is_scored else None
        for count, token in enumerate(self.row.request.resume, start=1):
            _, reason = self._advance(token, count, fits=True)
        return reason

    def gain(self, run: Sequence[Drawn], answered: Callable[[int], bool]) -> tuple[Delta, str | None]:
        """What tokens bring, one after the other up to the last one, and why that is the last. `answered`
        counts one, and says whether there is memory for more."""
        request = self.row.request
        tokens: list[int] = []
        reported: list[parts.Likelihood] = []
        grown, reason = Growth(), None
        for token, likelihood in run:
            fits = answered(token)
            growth, reason = self._advance(token, len(self.row.answered), fits=fits)
            tokens.append(token)
            grown = growth if len(tokens) == 1 else grown.then(growth)
            # The end of an answer is no token of it, and only the worker knows which tokens are ends.
            # Who scores texts counts on one more than the prompt has.
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

    def _advance(self, token: int, count: int, *, fits: bool) -> tuple[Growth, str | None]:
        request, pipeline = self.row.request, self.pipeline
        if token in request.end_tokens:
            return pipeline.flush(), self._own_end()
        growth = pipeline.push(token)
        if pipeline.stopped:
            return growth, self._own_end()
        if count >= request.max_tokens or not fits:
            return growth.then(pipeline.flush()), "length"
        return growth, None

    def _own_end(self) -> str:
        return "tool_calls" if self.pipeline.has_called else "stop"

    def _spell(self, token: int, likelihood: Likelihood) -> parts.Likelihood:
        spell = self.pipeline.spell
        return parts.Likelihood(
            bytes=spell(token),
            logprob=likelihood.logprob,
            top=[(spell(other), logprob) for other, logprob in likelihood.top],
        )

    def spell_prompt(self, token: int, likelihood: Likelihood | None) -> PromptToken:
        """A token of the prompt, with no more of the likeliest than this request asks for. None: it follows
        nothing."""
        spell = self.pipeline.spell
        if likelihood is None:
            return PromptToken(bytes=spell(token))
        asked = likelihood.top[: self.row.request.draw.logprobs]
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
            reasoning_tokens=self.pipeline.reasoning_tokens,
            accepted_tokens=self.accepted,
            rejected_tokens=self.rejected,
        )

    def status(self, now: float) -> RowStatus:
        row = self.row
        return RowStatus(
            id=row.id,
            phase=row.phase,
            prompt_tokens=len(row.request.tokens),
            prefilled=min(row.prefilled, len(row.request.tokens)),
            answered=len(row.answered),
            seconds=now - self.submitted_at,
            first_token_s=self.first_token_at and self.first_token_at - self.submitted_at,
            reuse=row.reuse,
            preemptions=row.preemptions,
        )

    def timings(self, now: float) -> Timings:
        prefill_at = self.prefill_at or now
        decode_at = self.decode_at or now
        return Timings(
            queued_s=prefill_at - self.submitted_at,
            prefill_s=decode_at - prefill_at,
            decode_s=now - decode_at,
        )
