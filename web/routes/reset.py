"""A forgotten password: ask for the mail, and choose a new one behind its link.

The link only shows a form: mail scanners and link previews fetch links, and must not use one up.
"""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from accounts import email_tokens, password_reset
from accounts.errors import InvalidEmail, WeakPassword
from accounts.passwords import MIN_LENGTH
from common.db import read_only
from web.dependencies import CurrentVisitor, Posted, Services, Visitor, client_address
from web.forms import FormState
from web.pages import get_pages
from web.redirects import see_other

router = APIRouter()


@router.api_route("/forgot", methods=["GET", "HEAD"])
async def show_forgot(request: Request, visitor: CurrentVisitor) -> Response:
    """The form that asks for the mail."""
    return _form(request, "forgot.html", visitor, form=FormState())


@router.post("/forgot")
async def forgot(
    request: Request, services: Services, visitor: CurrentVisitor, posted: Posted
) -> Response:
    """Promise the mail; the answer is the same whether the address has an account or not."""
    email = posted.text("email")
    await services.throttle.reset_mail(address=client_address(request), email=email)
    try:
        async with services.sessions.begin() as session:
            await password_reset.request(session, email, clock=services.clock)
    except InvalidEmail as error:
        form = FormState(values={"email": email}, errors={"email": error.message})
        pages = get_pages(request)
        return pages.render(request, "forgot.html", visitor, status_code=422, form=form)
    return see_other("/forgot/sent")


@router.api_route("/forgot/sent", methods=["GET", "HEAD"])
async def show_sent(request: Request, services: Services, visitor: CurrentVisitor) -> Response:
    """What to wait for."""
    settings = services.accounts_settings
    return get_pages(request).render(
        request,
        "forgot_sent.html",
        visitor,
        minutes=settings.email_token_ttl_s // 60,
        is_on_console=settings.mail_backend == "console",
    )


@router.api_route("/reset", methods=["GET", "HEAD"])
async def show_reset(request: Request, visitor: CurrentVisitor) -> Response:
    """The form for the new password; nothing is used up yet."""
    token = request.query_params.get("token", "")[: email_tokens.MAX_LENGTH]
    return _form(request, "reset.html", visitor, **_reset(FormState(), token))


@router.post("/reset")
async def reset(
    request: Request, services: Services, visitor: CurrentVisitor, posted: Posted
) -> Response:
    """Set the password and end every session of its user; raises InvalidToken."""
    token, address = posted.text("token"), client_address(request)
    await services.throttle.reset(address=address)
    try:
        async with read_only(services.sessions) as session:
            password_hash = await password_reset.hash_new(
                session,
                token,
                posted.exact("password"),
                hasher=services.password_hasher,
                clock=services.clock,
            )
    except WeakPassword as error:
        form = FormState(errors={"password": error.message})
        return get_pages(request).render(
            request, "reset.html", visitor, status_code=422, **_reset(form, token)
        )
    async with services.sessions.begin() as session:
        await password_reset.reset(
            session, token, password_hash, address=address, clock=services.clock
        )
    return see_other("/reset/done")


@router.api_route("/reset/done", methods=["GET", "HEAD"])
async def show_done(request: Request, visitor: CurrentVisitor) -> Response:
    """Where to go now."""
    return get_pages(request).render(request, "reset_done.html", visitor)


def _form(request: Request, template: str, visitor: Visitor, **context: Any) -> Response:
    """A form for anybody: with the session's token, or with that of a visit."""
    pages = get_pages(request)
    show = pages.render if visitor.is_signed_in else pages.render_visitor_form
    return show(request, template, visitor, **context)


def _reset(form: FormState, token: str) -> dict[str, Any]:
    hint = f"At least {MIN_LENGTH} characters."
    return {"form": form, "token": token, "password_hint": hint}
