"""What a route may ask for. FastAPI calls each of these once per request."""

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from accounts import sessions as account_sessions
from accounts.sessions import FoundSession
from common.db import read_only
from web import csrf
from web.errors import LoginRequired
from web.forms import NOTHING_POSTED, PostedForm, read_posted_form
from web.services import WebServices
from web.sessions import read_cookie


def get_services(request: Request) -> WebServices:
    """What `create_app` was given."""
    services: WebServices = request.app.state.services
    return services


Services = Annotated[WebServices, Depends(get_services)]


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whoever sent the request: signed in or not."""

    found: FoundSession | None
    session_token: str | None
    """The session cookie as it was sent, live or not."""
    csrf_token: str | None
    """What this browser's forms must carry; None: no session, and no form was opened yet."""

    @property
    def is_signed_in(self) -> bool:
        """A live session came with the request."""
        return self.found is not None


@dataclass(frozen=True, slots=True)
class Account:
    """Someone signed in, and the organization that every query of theirs names."""

    organization_id: str
    user_id: str
    email: str
    session_token: str
    visitor: Visitor


async def get_visitor(request: Request, services: Services) -> Visitor:
    """Look up the session cookie; without a live session, the visit cookie decides the token."""
    settings = services.web_settings
    token = read_cookie(request, "session", settings)
    if token is not None:
        async with read_only(services.sessions) as session:
            found = await account_sessions.find(session, token)
        if found is not None:
            return Visitor(found, token, found.csrf_token)
    visit = read_cookie(request, "visit", settings)
    return Visitor(None, token, None if visit is None else csrf.visit_token(visit, settings))


CurrentVisitor = Annotated[Visitor, Depends(get_visitor)]


async def get_posted_form(
    request: Request, services: Services, visitor: CurrentVisitor
) -> PostedForm:
    """The form of an unsafe request, once it is known to be ours. The whole application depends on
    this, so that no route can forget it. Raises FormForged, FormUnreadable, FormTooLarge."""
    if request.method in csrf.SAFE_METHODS:
        return NOTHING_POSTED
    csrf.refuse_foreign_sender(request, services.web_settings)
    form = await read_posted_form(request, max_bytes=services.web_settings.max_form_bytes)
    csrf.refuse_foreign_token(form.exact(csrf.TOKEN_FIELD), visitor.csrf_token)
    return form


Posted = Annotated[PostedForm, Depends(get_posted_form)]


def get_account(request: Request, visitor: CurrentVisitor) -> Account:
    """Someone signed in; raises LoginRequired, which comes back here after logging in."""
    found = visitor.found
    if found is None or visitor.session_token is None:
        query = f"?{request.url.query}" if request.url.query else ""
        is_page = request.method in csrf.SAFE_METHODS
        raise LoginRequired(
            "Log in to see this page.", next=request.url.path + query if is_page else ""
        )
    assert found.principal.user_id is not None, "a browser session belongs to a user"
    return Account(
        organization_id=found.principal.organization_id,
        user_id=found.principal.user_id,
        email=found.user_email,
        session_token=visitor.session_token,
        visitor=visitor,
    )


SignedIn = Annotated[Account, Depends(get_account)]


def client_address(request: Request) -> str:
    """The address that log-in and sign-up attempts are counted by."""
    host = request.client.host if request.client else ""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:  # a Unix socket or a test transport
        return "127.0.0.1"
