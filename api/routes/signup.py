"""`POST /v1/signup`: an account, its first key and its free credit, in one call."""

from fastapi import APIRouter, Request

from api.body import read_json
from api.dependencies import ServicesDependency
from api.openapi import body_of, errors
from api.schemas.account import SignUpAnswer, SignUpBody
from billing import signup
from billing.money import format_usd

router = APIRouter(tags=["account"])


@router.post(
    "/v1/signup",
    status_code=201,
    responses=errors(400, 413, 415, 429, 503),
    openapi_extra=body_of(SignUpBody) | {"security": []},
)
async def sign_up(request: Request, services: ServicesDependency) -> SignUpAnswer:
    """Create an account. Counted by network and by inbox, beyond which it answers 429."""
    body = await read_json(request, SignUpBody, services.settings)
    address = request.client.host if request.client else "unknown"
    await services.throttle.sign_up(address=address, email=body.email)
    async with services.sessions.begin() as session:
        signed_up = await signup.sign_up(
            session,
            email=body.email,
            password=body.password,
            hasher=services.password_hasher,
            key_ring=services.key_ring,
            accounts_settings=services.accounts_settings,
            billing_settings=services.billing_settings,
            address=address,
            clock=services.clock,
        )
    return SignUpAnswer(
        organization=signed_up.organization.id,
        email=signed_up.user.email,
        api_key=signed_up.issued_key.plaintext,
        key_id=signed_up.issued_key.key.id,
        credit=format_usd(signed_up.granted_nano_usd),
        is_verification_needed=services.accounts_settings.is_email_verification_on,
    )
