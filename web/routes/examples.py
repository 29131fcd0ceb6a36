"""The request that several pages show, for whichever model there is."""

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession

from web.catalogue import first_model
from web.services import WebServices
from web.snippets import KEY_VARIABLE, Snippets, base_url

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Named in examples while nothing is hosted."""


async def example_request(
    request: Request, services: WebServices, session: AsyncSession, *, key: str | None = None
) -> Snippets:
    """Snippets for the first model of the catalogue, with `key` written in when there is one."""
    model = await first_model(session)
    return Snippets(
        base_url=base_url(request, services.web_settings),
        model=DEFAULT_MODEL if model is None else model.name,
        key=key or KEY_VARIABLE,
    )
