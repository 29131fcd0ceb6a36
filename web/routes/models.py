"""Models, their prices, and asking for one that is not there."""

import re
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from common.db import read_only
from engine import catalog
from engine.catalog import TooManyModelRequests
from web.catalogue import find_model, list_models, read_heartbeats
from web.dependencies import CurrentVisitor, Posted, Services, SignedIn, Visitor
from web.forms import FormState
from web.pages import get_pages
from web.redirects import see_other
from web.services import WebServices
from web.snippets import Snippets, base_url

router = APIRouter()

MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
HUB_ADDRESS = re.compile(r"^(?:https?://)?(?:www\.)?huggingface\.co/(?:models/)?", re.IGNORECASE)
MAX_REASON_LENGTH = 1_000
MAX_SHOWN_WISHES = 50


@dataclass(frozen=True, slots=True)
class Wish:
    """A model that somebody asked for, and what became of it."""

    name: str
    status: str
    created_at: int


@router.api_route("/models", methods=["GET", "HEAD"])
async def show_models(request: Request, services: Services, visitor: CurrentVisitor) -> Response:
    """Open to everybody; someone signed in may also ask for a model."""
    return await _render_models(request, services, visitor, FormState())


@router.post("/models")
async def ask_for_model(
    request: Request, services: Services, account: SignedIn, posted: Posted
) -> Response:
    """Note the wish; it appears in the list with its status."""
    name = HUB_ADDRESS.sub("", posted.text("name")).strip("/")
    reason = posted.text("reason")
    errors = {}
    if MODEL_ID.fullmatch(name) is None:
        errors["name"] = "Write it as on Hugging Face: owner/name."
    if len(reason) > MAX_REASON_LENGTH:
        errors["reason"] = f"At most {MAX_REASON_LENGTH:,} characters, please."
    if errors:
        form = FormState(values={"name": posted.text("name"), "reason": reason}, errors=errors)
        return await _render_models(request, services, account.visitor, form, status_code=422)
    try:
        async with services.sessions.begin() as session:
            await catalog.request_model(
                session,
                name=name,
                reason=reason,
                organization_id=account.organization_id,
                email=account.email,
            )
    except TooManyModelRequests as error:
        form = FormState(values={"name": name, "reason": reason}, errors={"": error.message})
        return await _render_models(request, services, account.visitor, form, status_code=422)
    return see_other("/models", asked="1")


@router.api_route("/models/{name:path}", methods=["GET", "HEAD"])
async def show_model(
    request: Request, services: Services, visitor: CurrentVisitor, name: str
) -> Response:
    """One model; raises ModelNotFound."""
    model = await find_model(services, name)
    address = base_url(request, services.web_settings)
    snippets = Snippets(address, model.name, kind=model.kind)
    return get_pages(request).render(request, "model.html", visitor, model=model, snippets=snippets)


async def _render_models(
    request: Request,
    services: WebServices,
    visitor: Visitor,
    form: FormState,
    *,
    status_code: int = 200,
) -> Response:
    return get_pages(request).render(
        request,
        "models.html",
        visitor,
        status_code=status_code,
        models=await list_models(services, await read_heartbeats(services.broker)),
        wishes=await _wishes(services, visitor),
        asked=request.query_params.get("asked") == "1",
        form=form,
    )


async def _wishes(services: WebServices, visitor: Visitor) -> list[Wish]:
    if visitor.found is None:
        return []
    async with read_only(services.sessions) as session:
        found = await catalog.list_requests(
            session,
            organization_id=visitor.found.principal.organization_id,
            limit=MAX_SHOWN_WISHES,
        )
        return [Wish(row.name, row.status, row.created_at) for row in found]
