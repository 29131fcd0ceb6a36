"""`GET /v1/credits`: what there is to spend."""

from fastapi import APIRouter

from api.authentication import AnyCaller
from api.dependencies import ServicesDependency
from api.openapi import errors
from api.schemas.account import CreditsAnswer
from billing import ledger
from billing.money import format_usd
from common.db import read_only

router = APIRouter(tags=["account"])


@router.get("/v1/credits", responses=errors(401))
async def get_credits(services: ServicesDependency, principal: AnyCaller) -> CreditsAnswer:
    """The balance of the key's organization, in dollars with nine places."""
    async with read_only(services.sessions) as session:
        balance = await ledger.balance(session, principal.organization_id)
    return CreditsAnswer(
        organization=principal.organization_id,
        balance=format_usd(balance.posted),
        held=format_usd(balance.held),
        available=format_usd(balance.available),
        promotional=format_usd(balance.promotional),
        paid=format_usd(balance.paid),
    )
