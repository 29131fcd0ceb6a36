"""Projects: parts of an organization that keys, usage and budgets are grouped under."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.errors import ProjectNotFound
from accounts.models import Project
from common.clock import Clock, utc_now_us
from common.ids import new_id

MAX_NAME_LENGTH = 100


async def create_project(
    session: AsyncSession, organization_id: str, *, name: str, clock: Clock = utc_now_us
) -> Project:
    """A new project of this organization."""
    project = Project(
        id=new_id("proj"),
        organization_id=organization_id,
        name=name.strip()[:MAX_NAME_LENGTH],
        created_at=clock(),
    )
    session.add(project)
    await session.flush()
    return project


async def find_project(session: AsyncSession, organization_id: str, project_id: str) -> Project:
    """A project of this organization; raises ProjectNotFound."""
    found = await session.scalars(
        select(Project).where(Project.organization_id == organization_id, Project.id == project_id)
    )
    project = found.one_or_none()
    if project is None:
        raise ProjectNotFound("This organization has no such project.", project_id=project_id)
    return project


async def list_projects(session: AsyncSession, organization_id: str) -> list[Project]:
    """Every project of an organization, oldest first."""
    found = await session.scalars(
        select(Project)
        .where(Project.organization_id == organization_id)
        .order_by(Project.created_at, Project.id)
    )
    return list(found)
