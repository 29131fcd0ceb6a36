"""Documentation pages."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from common.db import read_only
from web.dependencies import CurrentVisitor, Services
from web.pages import get_pages
from web.routes.examples import example_request

router = APIRouter()


@router.api_route("/docs/quickstart", methods=["GET", "HEAD"])
async def show_quickstart(
    request: Request, services: Services, visitor: CurrentVisitor
) -> Response:
    """From nothing to a streamed answer."""
    async with read_only(services.sessions) as session:
        snippets = await example_request(request, services, session)
    return get_pages(request).render(request, "quickstart.html", visitor, snippets=snippets)
