"""API keys: list, create (shown once), revoke (asked twice)."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from accounts import api_keys, audit
from accounts.api_keys import MAX_NAME_LENGTH
from accounts.errors import KeyNotFound
from accounts.models import ApiKey
from accounts.principal import ACCOUNT, INFERENCE
from common.db import read_only
from web.dependencies import Account, Posted, Services, SignedIn, client_address
from web.formatting import ago
from web.forms import FormState
from web.key_page import give_pad, leave_key, take_key
from web.pages import get_pages
from web.redirects import see_other
from web.routes.examples import example_request
from web.services import WebServices

router = APIRouter()


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as the page shows it: enough to tell it from the others, not to use it."""

    id: str
    name: str
    hint: str
    created_at: int
    last_used: str
    revoked_at: int | None

    @property
    def is_revoked(self) -> bool:
        """Refused for good."""
        return self.revoked_at is not None


@router.api_route("/keys", methods=["GET", "HEAD"])
async def show_keys(request: Request, services: Services, account: SignedIn) -> Response:
    """The organization's keys, live ones first."""
    return await _render_keys(request, services, account, FormState())


@router.post("/keys")
async def create_key(
    request: Request, services: Services, account: SignedIn, posted: Posted
) -> Response:
    """Issue a key and go to the page that shows it once."""
    name = posted.text("name")
    problem = _name_problem(name)
    if problem is not None:
        form = FormState(values={"name": name}, errors={"name": problem})
        return await _render_keys(request, services, account, form, status_code=422)
    async with services.sessions.begin() as session:
        issued = await api_keys.issue(
            session,
            account.organization_id,
            name=name,
            scopes=(INFERENCE, ACCOUNT),
            created_by=account.user_id,
            key_ring=services.key_ring,
            clock=services.clock,
        )
        await audit.record(
            session,
            "api_key.issued",
            organization_id=account.organization_id,
            user_id=account.user_id,
            target=issued.key.id,
            address=client_address(request),
        )
        pad = await leave_key(services, account.session_token, issued.plaintext)
    response = see_other("/keys/created")
    give_pad(response, services, pad)
    return response


@router.api_route("/keys/created", methods=["GET", "HEAD"])
async def show_created_key(request: Request, services: Services, account: SignedIn) -> Response:
    """The new key, once; afterwards the list."""
    key = await take_key(request, services, account.session_token)
    if key is None:
        return see_other("/keys")
    async with read_only(services.sessions) as session:
        snippets = await example_request(request, services, session, key=key)
    return get_pages(request).render(
        request, "key_created.html", account.visitor, key=key, snippets=snippets
    )


@router.api_route("/keys/{key_id}/revoke", methods=["GET", "HEAD"])
async def ask_to_revoke(
    request: Request, services: Services, account: SignedIn, key_id: str
) -> Response:
    """Are you sure? Raises KeyNotFound for another organization's key."""
    keys = await _list_keys(services, account)
    key = next((key for key in keys if key.id == key_id), None)
    if key is None:
        raise KeyNotFound("You have no such key.", api_key_id=key_id)
    if key.is_revoked:
        return see_other("/keys")
    return get_pages(request).render(request, "key_revoke.html", account.visitor, key=key)


@router.post("/keys/{key_id}/revoke")
async def revoke_key(
    request: Request, services: Services, account: SignedIn, key_id: str
) -> Response:
    """Revoke it; raises KeyNotFound for another organization's key."""
    async with services.sessions.begin() as session:
        key = await api_keys.revoke(session, account.organization_id, key_id, clock=services.clock)
        await audit.record(
            session,
            "api_key.revoked",
            organization_id=account.organization_id,
            user_id=account.user_id,
            target=key.id,
            address=client_address(request),
        )
    return see_other("/keys")


async def _render_keys(
    request: Request,
    services: WebServices,
    account: Account,
    form: FormState,
    *,
    status_code: int = 200,
) -> Response:
    keys = await _list_keys(services, account)
    return get_pages(request).render(
        request, "keys.html", account.visitor, status_code=status_code, keys=keys, form=form
    )


async def _list_keys(services: WebServices, account: Account) -> list[ListedKey]:
    async with read_only(services.sessions) as session:
        keys = await api_keys.list_keys(session, account.organization_id)
        listed = [_listed(key, services.clock()) for key in keys]
    return sorted(listed, key=lambda key: key.is_revoked)


def _listed(key: ApiKey, now_us: int) -> ListedKey:
    return ListedKey(
        id=key.id,
        name=key.name,
        hint=f"{key.prefix}_…{key.last4}",
        created_at=key.created_at,
        last_used=ago(key.last_used_at, now_us),
        revoked_at=key.revoked_at,
    )


def _name_problem(name: str) -> str | None:
    if not name:
        return "Give the key a name."
    if len(name) > MAX_NAME_LENGTH:
        return f"A name may have at most {MAX_NAME_LENGTH} characters."
    return None
