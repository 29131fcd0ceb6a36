"""Confirming an e-mail address: the page behind the link in the mail.

The link only shows a button: mail scanners and link previews fetch links, and must not use one up.
"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from accounts import email_tokens, verification
from accounts.models import User
from billing import signup
from web.dependencies import CurrentVisitor, Posted, Services, SignedIn, client_address
from web.pages import get_pages
from web.redirects import see_other

router = APIRouter()


@router.api_route("/verify", methods=["GET", "HEAD"])
async def show_verify(request: Request, visitor: CurrentVisitor) -> Response:
    """The button that confirms; nothing is used up yet."""
    token = request.query_params.get("token", "")[: email_tokens.MAX_LENGTH]
    pages = get_pages(request)
    if visitor.is_signed_in:
        return pages.render(request, "verify.html", visitor, token=token)
    return pages.render_visitor_form(request, "verify.html", visitor, token=token)


@router.post("/verify")
async def verify(request: Request, services: Services, posted: Posted) -> Response:
    """Redeem the token and give the free credit; raises InvalidToken."""
    async with services.sessions.begin() as session:
        await signup.verify_email(
            session,
            posted.text("token"),
            settings=services.billing_settings,
            address=client_address(request),
            clock=services.clock,
        )
    return see_other("/verify/done")


@router.api_route("/verify/done", methods=["GET", "HEAD"])
async def show_done(request: Request, visitor: CurrentVisitor) -> Response:
    """Where to go now."""
    return get_pages(request).render(request, "verified.html", visitor)


@router.post("/verify/resend")
async def resend(services: Services, account: SignedIn) -> Response:
    """Promise another mail; one every five minutes at most."""
    async with services.sessions.begin() as session:
        user = await session.get_one(User, account.user_id)
        if user.email_verified_at is None:
            await verification.request(session, user, clock=services.clock)
    return see_other("/welcome")
