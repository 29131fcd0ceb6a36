"""`/v1/projects` and `/v1/budgets`: grouping keys, and bounding what they spend."""

from fastapi import APIRouter, Request, Response

from accounts import audit, projects
from accounts.models import Project
from api.authentication import AccountCaller
from api.body import read_json
from api.dependencies import ServicesDependency
from api.errors import InvalidRequest
from api.openapi import body_of, errors
from api.schemas.account import (
    BudgetBody,
    BudgetList,
    BudgetObject,
    NewProjectBody,
    ProjectList,
    ProjectObject,
)
from billing import budgets
from billing.budgets import OpenBudget
from billing.models import Budget
from billing.money import format_usd, parse_usd
from common.db import read_only

router = APIRouter(tags=["account"])


@router.get("/v1/projects", responses=errors(401, 403))
async def list_projects(services: ServicesDependency, principal: AccountCaller) -> ProjectList:
    """Every project of the organization."""
    async with read_only(services.sessions) as session:
        found = await projects.list_projects(session, principal.organization_id)
    return ProjectList(data=[_project(project) for project in found])


@router.post(
    "/v1/projects",
    status_code=201,
    responses=errors(400, 401, 403),
    openapi_extra=body_of(NewProjectBody),
)
async def create_project(
    request: Request, services: ServicesDependency, principal: AccountCaller
) -> ProjectObject:
    """A new project; name it in `POST /v1/keys` to put a key under it."""
    body = await read_json(request, NewProjectBody, services.settings)
    async with services.sessions.begin() as session:
        project = await projects.create_project(
            session, principal.organization_id, name=body.name, clock=services.clock
        )
    return _project(project)


@router.get("/v1/budgets", responses=errors(401, 403))
async def list_budgets(services: ServicesDependency, principal: AccountCaller) -> BudgetList:
    """Every budget of the organization, with what is spent and held of it."""
    async with read_only(services.sessions) as session:
        found = await budgets.list_budgets(session, principal.organization_id, clock=services.clock)
    return BudgetList(data=[_budget(budget, stand) for budget, stand in found])


@router.put("/v1/budgets", responses=errors(400, 401, 403, 404), openapi_extra=body_of(BudgetBody))
async def set_budget(
    request: Request, services: ServicesDependency, principal: AccountCaller
) -> BudgetObject:
    """Bound a key or a project. What is running counts; days and months are UTC."""
    body = await read_json(request, BudgetBody, services.settings)
    if (body.api_key is None) == (body.project is None):
        raise InvalidRequest("Name either an api_key or a project.", param="api_key")
    async with services.sessions.begin() as session:
        budget = await budgets.set_budget(
            session,
            principal.organization_id,
            api_key_id=body.api_key,
            project_id=body.project,
            limit_nano_usd=parse_usd(body.limit),
            period=body.period,
            clock=services.clock,
        )
        await audit.record(
            session,
            "budget.set",
            principal=principal,
            target=budget.id,
            limit_nano_usd=budget.limit_nano_usd,
            period=budget.period,
            clock=services.clock,
        )
        found = await budgets.list_budgets(session, principal.organization_id, clock=services.clock)
    return next(_budget(one, stand) for one, stand in found if one.id == budget.id)


@router.delete("/v1/budgets/{budget_id}", status_code=204, responses=errors(401, 403))
async def remove_budget(
    budget_id: str, services: ServicesDependency, principal: AccountCaller
) -> Response:
    """Bound it no longer."""
    async with services.sessions.begin() as session:
        await budgets.remove_budget(session, principal.organization_id, budget_id)
        await audit.record(
            session, "budget.removed", principal=principal, target=budget_id, clock=services.clock
        )
    return Response(status_code=204)


def _project(project: Project) -> ProjectObject:
    return ProjectObject(id=project.id, name=project.name, created=project.created_at // 1_000_000)


def _budget(budget: Budget, stand: OpenBudget) -> BudgetObject:
    return BudgetObject(
        id=budget.id,
        api_key=budget.api_key_id,
        project=budget.project_id,
        period=budget.period,
        limit=format_usd(stand.limit_nano_usd),
        spent=format_usd(stand.spent_nano_usd),
        held=format_usd(stand.held_nano_usd),
    )
