"""What the engine says: frames for the API nodes, and which requests are over.

It collects between two steps, and hands all of it over with the step's output.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypedDict

from engine.messages import (
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    Timing,
    TokenFrame,
    TokenLogprob,
)
from engine.output import Ended, StepOutput
from engine.scheduling.waits import WaitLedger
from engine.sequence import Sequence
from engine.speculation.acceptance import Run


class Reporter:
    """Speaks for the sequences of one engine, and counts the choices that each request has left."""

    def __init__(self, waits: WaitLedger, now_us: Callable[[], int]) -> None:
        self._waits = waits
        self._now_us = now_us
        self._open_choices: Counter[str] = Counter()
        self._output = StepOutput(step=0)

    @property
    def has_news(self) -> bool:
        """Whether there is something to hand over."""
        return bool(self._output.frames or self._output.finished)

    def has(self, request_id: str) -> bool:
        """Whether a choice of that request is open."""
        return request_id in self._open_choices

    def open(self, request: GenerateRequest, num_choices: int) -> None:
        """A request has come; one of which all choices have ended before is over at once."""
        self._open_choices[request.request_id] = num_choices
        if num_choices == 0:
            self._finish(request)

    def close(self, sequence: Sequence) -> None:
        """A sequence holds nothing any more; its request is finished with its last choice."""
        request_id = sequence.request.request_id
        self._open_choices[request_id] -= sequence.num_choices
        if self._open_choices[request_id] <= 0:
            self._finish(sequence.request)

    def forget(self, request_id: str) -> None:
        """Another worker runs this request; nothing is said of it."""
        self._open_choices.pop(request_id, None)

    def charge(self, charges: Mapping[str, float]) -> None:
        """Machine seconds by tenant."""
        for tenant, share in charges.items():
            self._output.charges[tenant] = self._output.charges.get(tenant, 0.0) + share

    def accept_form(self, sequence: Sequence) -> None:
        """The form that was required of the answer has been compiled."""
        self._say(sequence, TokenFrame(**_about(sequence), token_ids=(), is_accepted=True))

    def tell_prompt(self, sequence: Sequence, told: PromptLogprobs) -> None:
        """A part of a prompt is computed: how likely its tokens were."""
        self._say(sequence, TokenFrame(**_about(sequence), token_ids=(), prompt_logprobs=told))

    def tell_vector(self, sequence: Sequence, vector: bytes) -> None:
        """A pooled prompt is done."""
        frame = TokenFrame(
            **_about(sequence),
            token_ids=(),
            finish_reason="stop",
            timing=self._timing(sequence),
            vector=vector,
        )
        self._say(sequence, frame)

    def tell_tokens(
        self,
        sequence: Sequence,
        run: Run,
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: FinishReason | None,
        *,
        is_first: bool,
    ) -> None:
        """What was said in a step, which may be the end."""
        frame = TokenFrame(
            **_about(sequence, num_new=len(run.token_ids)),
            token_ids=tuple(run.token_ids),
            logprobs=logprobs,
            num_drafts=run.num_drafts,
            finish_reason=reason,
            stop_token_id=run.token_ids[-1] if reason == "stop" else None,
            num_cached_tokens=(sequence.num_cached_tokens or 0) if is_first else 0,
            timing=self._timing(sequence) if is_first or reason else None,
        )
        self._say(sequence, frame)

    def tell_end(
        self, sequence: Sequence, reason: FinishReason, *, error: str | None, is_refused: bool
    ) -> None:
        """The end outside the course of things; a sequence that has not forked has many choices."""
        for choice in range(sequence.choice, sequence.choice + sequence.num_choices):
            frame = TokenFrame(
                **_about(sequence) | {"choice": choice},
                token_ids=(),
                finish_reason=reason,
                error=error,
                is_refused=is_refused,
                timing=self._timing(sequence),
            )
            self._say(sequence, frame)

    def hand_over(self, step: int) -> StepOutput:
        """All that was said since the last time."""
        output = self._output
        output.step = step
        self._output = StepOutput(step=step)
        return output

    def _finish(self, request: GenerateRequest) -> None:
        del self._open_choices[request.request_id]
        self._output.finished.append(Ended(request.request_id, request.attempt))

    def _say(self, sequence: Sequence, frame: TokenFrame) -> None:
        self._output.frames.setdefault(sequence.request.node, []).append(frame)

    def _timing(self, sequence: Sequence) -> Timing:
        now_us = self._now_us()
        started_us = sequence.prefill_started_us
        if started_us is None:
            return Timing(queued_us=sequence.queued_us + now_us - sequence.added_us)
        first_us = sequence.first_token_us
        arrived_us = sequence.added_us - sequence.queued_us
        if sequence.waited is None:
            tenant = sequence.request.tenant
            sequence.waited = self._waits.behind(tenant, arrived_us, started_us)
        return Timing(
            queued_us=started_us - arrived_us,
            behind_own_us=sequence.waited.behind_own_us,
            behind_others_us=sequence.waited.behind_others_us,
            num_tenants=sequence.waited.num_tenants,
            prefill_us=(first_us or now_us) - started_us,
            decode_us=0 if first_us is None else now_us - first_us,
        )


class _About(TypedDict):
    request_id: str
    attempt: int
    choice: int
    first_index: int


def _about(sequence: Sequence, num_new: int = 0) -> _About:
    """What every frame says of whom it is about; `num_new` of its tokens are in the frame."""
    return {
        "request_id": sequence.request.request_id,
        "attempt": sequence.request.attempt,
        "choice": sequence.choice,
        "first_index": sequence.num_generated - num_new,
    }
