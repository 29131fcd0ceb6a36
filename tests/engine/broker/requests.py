"""Requests and frames for the tests."""

from engine.messages import FinishReason, GenerateRequest, Sampling, StepFrames, TokenFrame
from tests.engine.broker.conftest import MODEL


def new_request(
    request_id: str = "req_1",
    *,
    tenant: str = "org_1",
    node: str = "node-1",
    key: float = 1.0,
    weight: float = 1.0,
    work_s: float = 0.0,
    num_choices: int = 1,
    attempt: int = 1,
    prompt: list[int] | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model=MODEL,
        node=node,
        tenant=tenant,
        prompt_token_ids=prompt or [1, 2, 3],
        sampling=Sampling(temperature=0.0),
        authorized_tokens=16,
        max_tokens=16,
        arrival_ms=0,
        key=key,
        weight=weight,
        work_s=work_s,
        num_choices=num_choices,
        attempt=attempt,
    )


def new_frame(
    request: GenerateRequest,
    first_index: int,
    token_ids: tuple[int, ...],
    *,
    finish_reason: FinishReason | None = None,
    choice: int = 0,
) -> TokenFrame:
    return TokenFrame(
        request_id=request.request_id,
        attempt=request.attempt,
        first_index=first_index,
        token_ids=token_ids,
        finish_reason=finish_reason,
        choice=choice,
    )


def step_of(*frames: TokenFrame, worker: str = "worker-1", step: int = 1) -> StepFrames:
    return StepFrames(worker=worker, step=step, frames=list(frames))
