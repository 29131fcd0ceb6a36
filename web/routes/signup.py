"""Signing up, and the page that greets a new customer."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from accounts import sessions as account_sessions
from accounts.errors import DisposableEmail, EmailTaken, InvalidEmail, WeakPassword
from accounts.models import User
from accounts.passwords import MIN_LENGTH
from billing import ledger, signup
from common.db import read_only
from web.catalogue import first_model
from web.dependencies import CurrentVisitor, Posted, Services, SignedIn, client_address
from web.forms import FormState
from web.key_page import give_pad, leave_key, take_key
from web.pages import get_pages
from web.redirects import see_other
from web.routes.examples import example_request
from web.services import WebServices
from web.sessions import keep_session

router = APIRouter()

PASSWORD_HINT = f"At least {MIN_LENGTH} characters."


@router.api_route("/signup", methods=["GET", "HEAD"])
async def show_signup(request: Request, services: Services, visitor: CurrentVisitor) -> Response:
    """The form; someone signed in goes to the usage page."""
    if visitor.is_signed_in:
        return see_other("/usage")
    return get_pages(request).render_visitor_form(
        request,
        "signup.html",
        visitor,
        form=FormState(),
        password_hint=PASSWORD_HINT,
        **_promise(services),
    )


@router.post("/signup")
async def sign_up(
    request: Request, services: Services, visitor: CurrentVisitor, posted: Posted
) -> Response:
    """Make user, organization, key and credit in one transaction, log in, and go to the welcome
    page with the key."""
    email = posted.text("email")
    await services.throttle.sign_up(address=client_address(request), email=email)
    try:
        async with services.sessions.begin() as session:
            signed_up = await signup.sign_up(
                session,
                email=email,
                password=posted.exact("password"),
                hasher=services.password_hasher,
                key_ring=services.key_ring,
                accounts_settings=services.accounts_settings,
                billing_settings=services.billing_settings,
                address=client_address(request),
                clock=services.clock,
            )
            if visitor.session_token is not None:
                await account_sessions.end(session, visitor.session_token)
            started = await account_sessions.start(
                session,
                signed_up.user,
                signed_up.organization.id,
                settings=services.accounts_settings,
                clock=services.clock,
            )
            pad = await leave_key(services, started.token, signed_up.issued_key.plaintext)
    except (InvalidEmail, DisposableEmail, EmailTaken, WeakPassword) as error:
        field = "password" if isinstance(error, WeakPassword) else "email"
        return get_pages(request).render(
            request,
            "signup.html",
            visitor,
            status_code=422,
            form=FormState(values={"email": email}, errors={field: error.message}),
            password_hint=PASSWORD_HINT,
            **_promise(services),
        )
    response = see_other("/welcome")
    keep_session(response, started, services)
    give_pad(response, services, pad)
    return response


@router.api_route("/welcome", methods=["GET", "HEAD"])
async def show_welcome(request: Request, services: Services, account: SignedIn) -> Response:
    """The key, once; afterwards the same page without it."""
    async with read_only(services.sessions) as session:
        balance = await ledger.balance(session, account.organization_id)
        user = await session.get_one(User, account.user_id)
        has_model = await first_model(session) is not None
        key = await take_key(request, services, account.session_token)
        snippets = await example_request(request, services, session, key=key)
    return get_pages(request).render(
        request,
        "welcome.html",
        account.visitor,
        key=key,
        balance=balance,
        has_model=has_model,
        is_unverified=user.email_verified_at is None,
        snippets=snippets,
        **_promise(services),
    )


def _promise(services: WebServices) -> dict[str, Any]:
    """The free credit, and whether it comes only with a confirmed address."""
    return {
        "grant": services.billing_settings.signup_credit_nano_usd,
        "must_verify": services.accounts_settings.is_email_verification_on,
    }
