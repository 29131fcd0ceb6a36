"""Logging in and out."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from accounts import audit, organizations, users
from accounts import sessions as account_sessions
from accounts.errors import BadCredentials
from accounts.models import User
from common.db import read_only
from web.dependencies import CurrentVisitor, Posted, Services, client_address
from web.forms import FormState
from web.pages import get_pages
from web.redirects import safe_next, see_other
from web.sessions import delete_cookie, keep_session

router = APIRouter()


@router.api_route("/login", methods=["GET", "HEAD"])
async def show_login(request: Request, visitor: CurrentVisitor) -> Response:
    """The form; someone signed in goes straight on."""
    target = safe_next(request.query_params.get("next"))
    if visitor.is_signed_in:
        return see_other(target)
    return get_pages(request).render_visitor_form(
        request, "login.html", visitor, form=FormState(), next=target
    )


@router.post("/login")
async def log_in(
    request: Request, services: Services, visitor: CurrentVisitor, posted: Posted
) -> Response:
    """Check the password and start a new session; an older one of this browser ends."""
    email = posted.text("email")
    target = safe_next(posted.text("next"))
    address = client_address(request)
    await services.throttle.login(address=address, email=email)
    try:
        async with read_only(services.sessions) as session:
            user = await users.authenticate(
                session, email, posted.exact("password"), hasher=services.password_hasher
            )
            user_id = user.id
            organization_id = (await organizations.organizations_of(session, user_id))[0].id
    except BadCredentials as error:
        return get_pages(request).render(
            request,
            "login.html",
            visitor,
            status_code=401,
            form=FormState(values={"email": email}, errors={"": error.message}),
            next=target,
        )
    async with services.sessions.begin() as session:
        if visitor.session_token is not None:
            await account_sessions.end(session, visitor.session_token)
        started = await account_sessions.start(
            session,
            await session.get_one(User, user_id),
            organization_id,
            settings=services.accounts_settings,
            clock=services.clock,
        )
        await audit.record(
            session,
            "session.started",
            organization_id=organization_id,
            user_id=user_id,
            address=address,
        )
    response = see_other(target)
    keep_session(response, started, services)
    return response


@router.post("/logout")
async def log_out(services: Services, visitor: CurrentVisitor) -> Response:
    """End the session here and in the database."""
    if visitor.session_token is not None:
        async with services.sessions.begin() as session:
            await account_sessions.end(session, visitor.session_token)
    response = see_other("/")
    delete_cookie(response, "session", services.web_settings)
    return response
