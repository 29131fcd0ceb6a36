"""Disputes: money that a card's owner takes back, until the bank has decided.

An inquiry (`warning_…`) moves nothing. While a dispute's money is withdrawn, the credit is away, and
the organization may not spend; won, both come back. A balance may fall below zero by the disputed
sum, and by nothing else.
"""

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from accounts import audit
from accounts.models import Organization
from accounts.organizations import find_organization
from billing import chart, ledger, payment_mail, topups
from billing.errors import PaymentMismatch
from billing.ledger import Posting
from billing.payment_models import NANO_USD_PER_CENT, Dispute, Topup
from billing.payment_profiles import find_profile
from billing.stripe_client import DisputeFacts, Payments
from common.clock import Clock, utc_now_us
from common.db import Sessions

INQUIRY = "warning_"
WON = "won"
FINAL = frozenset({"won", "lost", "warning_closed"})


async def converge(
    sessions: Sessions, payments: Payments, dispute_id: str, *, clock: Clock = utc_now_us
) -> None:
    """Bring credit and permission to where a dispute is; does nothing for foreign ones."""
    facts = await payments.retrieve_dispute(dispute_id)
    await topups.meet(sessions, payments, facts.payment_intent_id, clock=clock)
    async with sessions.begin() as session:
        topup = await topups.lock_by_intent(session, facts.payment_intent_id)
        if topup is None:
            return
        dispute = await session.get(Dispute, facts.id)
        # What we were shown may be older than what we know; what we know has had its effect, and
        # an operator may have decided otherwise since.
        is_news = dispute is None or dispute.status not in (*FINAL, facts.status)
        if dispute is None:
            dispute = _new(topup, facts, clock)
            session.add(dispute)
            await session.flush()
        await _move_money(session, dispute, facts, clock=clock)
        if is_news:
            dispute.status, dispute.updated_at = facts.status, clock()
            await _freeze_or_release(session, dispute, clock=clock)


async def release(session: AsyncSession, organization_id: str, *, reason: str, actor: str) -> None:
    """An operator's decision: whatever froze the organization, it may spend again."""
    organization = await find_organization(session, organization_id)
    if organization.status == "frozen":
        organization.status = "active"
    await session.execute(
        update(Dispute)
        .where(Dispute.organization_id == organization_id)
        .values(is_freezing=False)
        .execution_options(synchronize_session=False)
    )
    await audit.record(
        session,
        "organization.released",
        organization_id=organization_id,
        target=organization_id,
        reason=reason,
        actor=actor,
    )


def _new(topup: Topup, facts: DisputeFacts, clock: Clock) -> Dispute:
    return Dispute(
        id=facts.id,
        organization_id=topup.organization_id,
        topup_id=topup.id,
        amount_cents=facts.amount_cents,
        status=facts.status,
        is_withdrawn=False,
        is_reinstated=False,
        is_freezing=False,
        created_at=clock(),
        updated_at=clock(),
    )


async def _move_money(
    session: AsyncSession, dispute: Dispute, facts: DisputeFacts, *, clock: Clock
) -> None:
    is_withdrawn = facts.withdrawn_cents != 0
    if facts.withdrawn_cents not in (0, dispute.amount_cents):
        raise PaymentMismatch("A dispute moves its whole amount.", dispute_id=dispute.id)
    if is_withdrawn == dispute.is_withdrawn or dispute.is_reinstated:
        return
    phase, sign = ("withdrawn", -1) if is_withdrawn else ("reinstated", 1)
    amount = sign * dispute.amount_cents * NANO_USD_PER_CENT
    await ledger.post(
        session,
        key=f"dp:{dispute.id}:{phase}",
        kind=f"dispute_{phase}",
        organization_id=dispute.organization_id,
        postings=[
            Posting(chart.customer(dispute.organization_id), amount),
            Posting(chart.STRIPE_CLEARING, -amount),
        ],
        actor="stripe",
        memo="Disputed payment" if is_withdrawn else "Dispute decided in your favour",
        lot_kind="paid",
        is_paid_used_first=True,
        clock=clock,
    )
    dispute.is_withdrawn, dispute.is_reinstated = is_withdrawn, not is_withdrawn
    await payment_mail.promise(
        session, f"dispute_{phase}", dispute.organization_id, about=dispute.id, clock=clock
    )


async def _freeze_or_release(session: AsyncSession, dispute: Dispute, *, clock: Clock) -> None:
    """A lost dispute goes on freezing: an operator decides whether to trust again."""
    must_freeze = not dispute.status.startswith(INQUIRY) and dispute.status != WON
    organization = await session.get_one(
        Organization, dispute.organization_id, with_for_update=True
    )
    others = await session.scalar(
        select(func.count()).where(
            Dispute.organization_id == dispute.organization_id,
            Dispute.id != dispute.id,
            Dispute.is_freezing,
        )
    )
    was_freezing = dispute.is_freezing
    # An organization that an operator has frozen is not ours to release.
    dispute.is_freezing = must_freeze and (
        was_freezing or organization.status == "active" or bool(others)
    )
    if dispute.is_freezing and organization.status == "active":
        organization.status = "frozen"
        profile = await find_profile(session, organization.id, is_locked=True)
        if profile is not None and profile.is_recharge_on:
            profile.is_recharge_on, profile.paused_because = False, "disputed"
        await _note(session, "organization.frozen", dispute, clock)
    elif was_freezing and not dispute.is_freezing and not others:
        organization.status = "active"
        await _note(session, "organization.released", dispute, clock)


async def _note(session: AsyncSession, action: str, dispute: Dispute, clock: Clock) -> None:
    await audit.record(
        session,
        action,
        organization_id=dispute.organization_id,
        target=dispute.id,
        status=dispute.status,
        clock=clock,
    )
