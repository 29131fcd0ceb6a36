"""`POST /v1/model_requests`: ask for a model that is not hosted yet."""

from fastapi import APIRouter, Request

from api.authentication import AnyCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.openapi import body_of, errors
from api.schemas.account import ModelRequestAnswer, ModelRequestBody
from engine import catalog

router = APIRouter(tags=["models"])


@router.post(
    "/v1/model_requests",
    status_code=201,
    responses=errors(400, 401),
    openapi_extra=body_of(ModelRequestBody),
)
async def request_model(
    request: Request, services: ServicesDependency, principal: AnyCaller
) -> ModelRequestAnswer:
    """Note a wish; operators see it beside the catalogue."""
    body = await read_json(request, ModelRequestBody, services.settings)
    async with services.sessions.begin() as session:
        wish = await catalog.request_model(
            session,
            name=body.model,
            reason=body.reason,
            organization_id=principal.organization_id,
        )
    return ModelRequestAnswer(
        id=wish.id, model=wish.name, status=wish.status, created=wish.created_at // 1_000_000
    )
