"""`POST /v1/password/forgot` and `/reset`: a new password, by a link in a mail."""

from fastapi import APIRouter, Request

from accounts import password_reset
from api.body import read_json
from api.dependencies import ServicesDependency
from api.openapi import body_of, errors
from api.schemas.account import (
    ForgotPasswordAnswer,
    ForgotPasswordBody,
    ResetPasswordAnswer,
    ResetPasswordBody,
)
from common.db import read_only

router = APIRouter(prefix="/v1/password", tags=["account"])


@router.post(
    "/forgot",
    status_code=202,
    responses=errors(400, 413, 415, 429, 503),
    openapi_extra=body_of(ForgotPasswordBody) | {"security": []},
)
async def forgot_password(request: Request, services: ServicesDependency) -> ForgotPasswordAnswer:
    """Mail a link that sets a new password, if the address has an account. Counted by network and
    by inbox, beyond which it answers 429; one mail in five minutes."""
    body = await read_json(request, ForgotPasswordBody, services.settings)
    await services.throttle.reset_mail(address=_address(request), email=body.email)
    async with services.sessions.begin() as session:
        await password_reset.request(session, body.email, clock=services.clock)
    return ForgotPasswordAnswer(message="If this address has an account, a mail is on its way.")


@router.post(
    "/reset",
    responses=errors(400, 413, 415, 429, 503),
    openapi_extra=body_of(ResetPasswordBody) | {"security": []},
)
async def reset_password(request: Request, services: ServicesDependency) -> ResetPasswordAnswer:
    """Use the mail's token, once, to set a password; every session of the user ends."""
    body = await read_json(request, ResetPasswordBody, services.settings)
    await services.throttle.reset(address=_address(request))
    async with read_only(services.sessions) as session:
        password_hash = await password_reset.hash_new(
            session,
            body.token,
            body.password,
            hasher=services.password_hasher,
            clock=services.clock,
        )
    async with services.sessions.begin() as session:
        await password_reset.reset(
            session, body.token, password_hash, address=_address(request), clock=services.clock
        )
    return ResetPasswordAnswer(is_reset=True)


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"
