"""`/v1/keys`: list, issue and revoke the keys of one's own organization."""

from fastapi import APIRouter, Request

from accounts import api_keys, audit
from accounts.models import ApiKey
from api.authentication import AccountCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.openapi import body_of, errors
from api.schemas.account import KeyList, KeyObject, NewKeyAnswer, NewKeyBody
from common.db import read_only

router = APIRouter(tags=["account"])


@router.get("/v1/keys", responses=errors(401, 403))
async def list_keys(services: ServicesDependency, principal: AccountCaller) -> KeyList:
    """Every key of the organization, revoked ones too, newest first."""
    async with read_only(services.sessions) as session:
        keys = await api_keys.list_keys(session, principal.organization_id)
        return KeyList(data=[key_object(key) for key in keys])


@router.post(
    "/v1/keys",
    status_code=201,
    responses=errors(400, 401, 403, 404),
    openapi_extra=body_of(NewKeyBody),
)
async def issue_key(
    request: Request, services: ServicesDependency, principal: AccountCaller
) -> NewKeyAnswer:
    """A new key, shown once. Nobody grants more scopes than their own key has."""
    body = await read_json(request, NewKeyBody, services.settings)
    async with services.sessions.begin() as session:
        issued = await api_keys.issue(
            session,
            principal,
            name=body.name,
            scopes=body.scopes,
            created_by=principal.user_id,
            key_ring=services.key_ring,
            project_id=body.project,
            clock=services.clock,
        )
        await audit.record(
            session,
            "api_key.issued",
            principal=principal,
            target=issued.key.id,
            clock=services.clock,
        )
    return NewKeyAnswer(key=issued.plaintext, **key_object(issued.key).model_dump())


@router.delete("/v1/keys/{key_id}", responses=errors(401, 403, 404))
async def revoke_key(
    key_id: str, services: ServicesDependency, principal: AccountCaller
) -> KeyObject:
    """Revoke a key for good; admission refuses it from this moment on."""
    async with services.sessions.begin() as session:
        key = await api_keys.revoke(
            session, principal.organization_id, key_id, clock=services.clock
        )
        await audit.record(
            session,
            "api_key.revoked",
            principal=principal,
            target=key.id,
            clock=services.clock,
        )
    return key_object(key)


def key_object(key: ApiKey) -> KeyObject:
    """A key as its owner sees it; times are Unix seconds."""
    return KeyObject(
        id=key.id,
        name=key.name,
        project=key.project_id,
        prefix=key.prefix,
        last4=key.last4,
        scopes=key.scopes.split(),
        created=key.created_at // 1_000_000,
        expires=_seconds(key.expires_at),
        revoked=_seconds(key.revoked_at),
        last_used=_seconds(key.last_used_at),
    )


def _seconds(timestamp_us: int | None) -> int | None:
    return None if timestamp_us is None else timestamp_us // 1_000_000
