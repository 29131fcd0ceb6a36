"""`/v1/admin/models`: host a model, and see how far it has come. The same line as `ncompass models add`.

This process only writes down what is wanted; the supervisor, which has the workers, carries it out.
"""

from fastapi import APIRouter, Request

from api.authentication import OperatorCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.openapi import body_of, errors
from api.schemas.hosting import AdditionList, AdditionObject, AddModelBody
from billing.money import parse_usd
from billing.pricing import Terms
from common.db import read_only
from engine import additions
from engine.additions import ModelAddition

router = APIRouter(tags=["administration"])


@router.post(
    "/v1/admin/models",
    status_code=202,
    responses=errors(400, 401, 403, 404),
    openapi_extra=body_of(AddModelBody),
)
async def add_model(
    request: Request, services: ServicesDependency, principal: OperatorCaller
) -> AdditionObject:
    """Have a model fetched, checked, loaded and tested; it is callable once its state is `live`."""
    body = await read_json(request, AddModelBody, services.settings)
    prices = (body.input_price, body.cached_price, body.output_price)
    terms = Terms.checked(*(parse_usd(price) for price in prices))
    async with services.sessions.begin() as session:
        addition = await additions.ask(
            session,
            source=body.source,
            name=body.name or "",
            description=body.description,
            licence=body.licence,
            base=body.base or "",
            allows_pickles=body.allow_pickles,
            terms=terms.encode(),
        )
        return _object(addition)


@router.get("/v1/admin/models", responses=errors(401, 403))
async def list_additions(services: ServicesDependency, principal: OperatorCaller) -> AdditionList:
    """The last models that were to be added, with what has become of them."""
    async with read_only(services.sessions) as session:
        return AdditionList(data=[_object(each) for each in await additions.recent(session)])


@router.get("/v1/admin/models/{addition_id}", responses=errors(401, 403, 404))
async def get_addition(
    addition_id: str, services: ServicesDependency, principal: OperatorCaller
) -> AdditionObject:
    """How far one has come."""
    async with read_only(services.sessions) as session:
        return _object(await additions.find(session, addition_id))


def _object(addition: ModelAddition) -> AdditionObject:
    return AdditionObject(
        id=addition.id,
        source=addition.source,
        model=addition.name,
        state=addition.state,
        failed_step=addition.failed_step,
        detail=addition.detail,
        created=addition.created_at // 1_000_000,
        updated=addition.updated_at // 1_000_000,
    )
