"""Who is asking: a key in `Authorization` or, as Anthropic's clients send it, in `x-api-key`.

Cookies are never read here.

Runs before the body is read, so that a stranger cannot make us parse anything.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from accounts.principal import ACCOUNT, INFERENCE, OPERATOR, Principal
from api.dependencies import services_of
from api.errors import KeyMissing, ScopeMissing

KEY_LENGTH_MAX = 512


def sent_key(request: Request) -> str:
    """The key of the `Authorization: Bearer …` header, else of `x-api-key`. Raises KeyMissing."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "")
    key = key.strip()
    if not key or len(key) > KEY_LENGTH_MAX:
        raise KeyMissing("Send your API key as 'Authorization: Bearer sk_ncompass_…'.")
    return key


def _require(scope: str | None) -> Callable[[Request], Awaitable[Principal]]:
    """A dependency that answers with the caller, who must hold `scope` (None: any live key)."""

    async def authenticate(request: Request) -> Principal:
        services = await services_of(request)
        principal = await services.key_cache.authenticate(sent_key(request))
        if scope is not None and scope not in principal.scopes:
            raise ScopeMissing(f"This key does not have the scope '{scope}'.", scope=scope)
        return principal

    return authenticate


inference_caller = _require(INFERENCE)
"""Who sends an inference request. Raises KeyMissing, ScopeMissing and what `KeyCache` raises."""

AnyCaller = Annotated[Principal, Depends(_require(None))]
InferenceCaller = Annotated[Principal, Depends(inference_caller)]
AccountCaller = Annotated[Principal, Depends(_require(ACCOUNT))]
OperatorCaller = Annotated[Principal, Depends(_require(OPERATOR))]
