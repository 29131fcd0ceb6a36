"""`GET /health`: is this process able to answer?"""

from fastapi import APIRouter

from api.dependencies import ServicesDependency
from api.openapi import errors
from api.schemas.base import ResponseBody

router = APIRouter(tags=["service"])


class Health(ResponseBody):
    """What a load balancer wants to know."""

    status: str


@router.get("/health", responses=errors(503), openapi_extra={"security": []})
async def health(services: ServicesDependency) -> Health:
    """200 while this process takes requests, 503 once it is shutting down."""
    services.running.require_open()
    return Health(status="ok")
