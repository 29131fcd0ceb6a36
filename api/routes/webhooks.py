"""`POST /v1/webhooks/stripe`: verified on its raw bytes, stored, answered. Nothing else."""

from fastapi import APIRouter, Request

from api.body import read_body
from api.dependencies import ServicesDependency
from billing import webhooks

router = APIRouter(include_in_schema=False)


@router.post("/v1/webhooks/stripe")
async def receive_stripe(request: Request, services: ServicesDependency) -> dict[str, bool]:
    """Put an event into the inbox. A repeated one is welcome."""
    payload = await read_body(request, services.settings)
    async with services.sessions.begin() as session:
        await webhooks.receive(
            session,
            payload,
            request.headers.get("stripe-signature", ""),
            settings=services.stripe_settings,
            clock=services.clock,
        )
    return {"received": True}
