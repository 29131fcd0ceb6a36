"""Documentation pages."""

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from common.db import read_only
from web import reference
from web.dependencies import CurrentVisitor, Services
from web.pages import get_pages
from web.routes.examples import example_request
from web.snippets import base_url

router = APIRouter()

BILL_SCRIPT = Path(__file__).parents[2] / "docs" / "recompute_bill.py"


@router.api_route("/docs", methods=["GET", "HEAD"])
async def show_docs() -> Response:
    """Where people look first."""
    return RedirectResponse("/docs/quickstart", status_code=303)


@router.api_route("/docs/quickstart", methods=["GET", "HEAD"])
async def show_quickstart(
    request: Request, services: Services, visitor: CurrentVisitor
) -> Response:
    """From nothing to a streamed answer."""
    async with read_only(services.sessions) as session:
        snippets = await example_request(request, services, session)
    return get_pages(request).render(request, "quickstart.html", visitor, snippets=snippets)


@router.api_route("/docs/recompute_bill.py", methods=["GET", "HEAD"])
async def show_bill_script() -> Response:
    """The program with which a customer computes the bill again from an export."""
    return Response(BILL_SCRIPT.read_text(encoding="utf-8"), media_type="text/plain")


@router.api_route("/docs/api", methods=["GET", "HEAD"])
async def show_reference(request: Request, services: Services, visitor: CurrentVisitor) -> Response:
    """Every address of the API, from its own description."""
    return get_pages(request).render(
        request,
        "reference.html",
        visitor,
        groups=reference.groups(services.api_document),
        base_url=base_url(request, services.web_settings),
    )
