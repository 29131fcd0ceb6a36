"""`/v1/admin/…`: what only an operator's key may do."""

import msgspec
from fastapi import APIRouter, Request

from api.authentication import OperatorCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.openapi import body_of, errors
from api.schemas.account import AdjustCreditAnswer, AdjustCreditBody, WorkerList, WorkerObject
from billing import ledger
from billing.money import format_usd, parse_usd
from common.ids import new_id

router = APIRouter(tags=["administration"])


@router.post(
    "/v1/admin/credits/adjust",
    responses=errors(400, 401, 403, 404),
    openapi_extra=body_of(AdjustCreditBody),
)
async def adjust_credit(
    request: Request, services: ServicesDependency, principal: OperatorCaller
) -> AdjustCreditAnswer:
    """Give or take credit: an entry in the ledger with a reason, never an edit."""
    body = await read_json(request, AdjustCreditBody, services.settings)
    amount = parse_usd(body.amount)
    async with services.sessions.begin() as session:
        transaction = await ledger.adjust_credit(
            session,
            body.organization,
            amount,
            reason=body.reason,
            actor=f"api_key:{principal.api_key_id}",
            key=body.idempotency_key or new_id("adj"),
            clock=services.clock,
        )
        balance = await ledger.balance(session, body.organization)
    return AdjustCreditAnswer(
        transaction=transaction.id,
        organization=body.organization,
        amount=format_usd(amount),
        available=format_usd(balance.available),
    )


@router.get("/v1/admin/workers", responses=errors(401, 403, 503))
async def list_workers(services: ServicesDependency, principal: OperatorCaller) -> WorkerList:
    """The live workers of all models, by their last heartbeats."""
    heartbeats = await services.broker.heartbeats(None)
    return WorkerList(
        data=[WorkerObject.model_validate(msgspec.to_builtins(beat)) for beat in heartbeats]
    )
