"""The front page."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from web.catalogue import list_models, read_heartbeats
from web.dependencies import CurrentVisitor, Services
from web.pages import get_pages
from web.routes.examples import DEFAULT_MODEL
from web.snippets import Snippets, base_url

router = APIRouter()


@router.api_route("/", methods=["GET", "HEAD"])
async def show_home(request: Request, services: Services, visitor: CurrentVisitor) -> HTMLResponse:
    """What this is, what it costs, and the first request."""
    models = await list_models(services, await read_heartbeats(services.broker))
    writing = [model for model in models if model.kind == "generate"]
    live = [model.name for model in writing if model.state in ("live", "hosted")]
    name = next(iter(live or [model.name for model in writing]), DEFAULT_MODEL)
    return get_pages(request).render(
        request,
        "home.html",
        visitor,
        models=models,
        grant=services.billing_settings.signup_credit_nano_usd,
        must_verify=services.accounts_settings.is_email_verification_on,
        snippets=Snippets(base_url(request, services.web_settings), name),
    )
