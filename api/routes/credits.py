"""`GET /v1/credits`: what there is to spend."""

from fastapi import APIRouter

from api.authentication import AnyCaller
from api.dependencies import ServicesDependency
from api.openapi import errors
from api.schemas.account import CreditsAnswer, EndingCredit
from billing import ledger, lots
from billing.money import format_usd
from common.clock import to_datetime
from common.db import read_only

router = APIRouter(tags=["account"])


@router.get("/v1/credits", responses=errors(401))
async def get_credits(services: ServicesDependency, principal: AnyCaller) -> CreditsAnswer:
    """The balance of the key's organization, in dollars with nine places."""
    async with read_only(services.sessions) as session:
        balance = await ledger.balance(session, principal.organization_id)
        ending = await lots.next_end(session, principal.organization_id)
    return CreditsAnswer(
        organization=principal.organization_id,
        balance=format_usd(balance.posted),
        held=format_usd(balance.held),
        available=format_usd(balance.available),
        promotional=format_usd(balance.promotional),
        paid=format_usd(balance.paid),
        ends_next=ending
        and EndingCredit(
            amount=format_usd(ending.amount_nano_usd),
            at=to_datetime(ending.ends_at).isoformat(timespec="seconds"),
        ),
    )
