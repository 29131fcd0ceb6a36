"""Organizations, the tenants of the platform, and who belongs to them."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.errors import OrganizationNotFound
from accounts.models import Membership, Organization, User
from common.clock import Clock, utc_now_us
from common.ids import new_id

MAX_NAME_LENGTH = 100


async def create_organization(
    session: AsyncSession, *, name: str, owner: User | None, clock: Clock = utc_now_us
) -> Organization:
    """A new organization; `owner` None for the operator's own, which only has keys."""
    organization = Organization(
        id=new_id("org"), name=name[:MAX_NAME_LENGTH], status="active", created_at=clock()
    )
    session.add(organization)
    await session.flush()
    if owner is not None:
        session.add(Membership(organization_id=organization.id, user_id=owner.id, role="owner"))
        await session.flush()
    return organization


async def find_organization(session: AsyncSession, organization_id: str) -> Organization:
    """The organization; raises OrganizationNotFound."""
    organization = await session.get(Organization, organization_id)
    if organization is None:
        raise OrganizationNotFound(
            f"There is no organization {organization_id}.", organization_id=organization_id
        )
    return organization


async def organizations_of(session: AsyncSession, user_id: str) -> list[Organization]:
    """The organizations that a user belongs to, oldest first."""
    found = await session.scalars(
        select(Organization)
        .join(Membership, Membership.organization_id == Organization.id)
        .where(Membership.user_id == user_id)
        .order_by(Organization.created_at, Organization.id)
    )
    return list(found)
