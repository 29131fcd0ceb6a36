"""Trying a model in the browser, through the public API and with a key of one's own."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from web.catalogue import list_models, read_heartbeats
from web.dependencies import CurrentVisitor, Services
from web.pages import get_pages

router = APIRouter()


@router.api_route("/playground", methods=["GET", "HEAD"])
async def show_playground(
    request: Request, services: Services, visitor: CurrentVisitor
) -> Response:
    """Open to everybody: what runs there is asked for, and paid, with the key that is put in."""
    models = await list_models(services, await read_heartbeats(services.broker))
    return get_pages(request).render(
        request,
        "playground.html",
        visitor,
        models=[model for model in models if model.kind == "generate"],
        chosen=request.query_params.get("model", ""),
    )
