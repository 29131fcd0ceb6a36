"""What runs now."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from web.catalogue import list_models, read_heartbeats
from web.dependencies import CurrentVisitor, Services
from web.pages import get_pages

router = APIRouter()


@router.api_route("/status", methods=["GET", "HEAD"])
async def show_status(request: Request, services: Services, visitor: CurrentVisitor) -> Response:
    """The workers of each model, as they describe themselves."""
    heartbeats = await read_heartbeats(services.broker)
    return get_pages(request).render(
        request,
        "status.html",
        visitor,
        models=await list_models(services, heartbeats),
        is_connected=heartbeats is not None,
        now=services.clock(),
    )
