"""Stripe's webhooks: verified, stored, answered. The work is done from the inbox, later.

An event only says which object changed. The handler asks Stripe for the object and converges to it,
so that events may come late, twice, in any order, from any API version, or not at all: the sweep
lists what was missed into the same inbox.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from billing import disputes, payment_profiles, refunds, topups
from billing.errors import PaymentMismatch, PaymentsOff
from billing.payment_models import StripeEvent
from billing.stripe_client import EventFacts, Payments, verify_signature
from billing.stripe_settings import StripeSettings
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.db import Sessions
from common.errors import PlatformError
from common.upsert import insert_or_ignore

logger = structlog.get_logger(__name__)

MAX_PAYLOAD_BYTES = 512 * 1024
MAX_PER_RUN = 50
MAX_ATTEMPTS = 20
FIRST_RETRY_S = 60
LONGEST_RETRY_S = 3_600

Handler = Callable[[Sessions, Payments, str, Clock], Awaitable[None]]


async def receive(
    session: AsyncSession,
    payload: bytes,
    signature: str,
    *,
    settings: StripeSettings,
    clock: Clock = utc_now_us,
) -> bool:
    """Store a webhook in the inbox; False when it is stored already or not of interest.

    Raises PaymentsOff, and PaymentMismatch for what Stripe has not signed.
    """
    if settings.webhook_secret is None:
        raise PaymentsOff("This machine takes no webhooks of Stripe's.")
    verify_signature(payload, signature, settings.webhook_secret.get_secret_value())
    event = _read(payload)
    return await store(session, event, clock=clock)


async def store(session: AsyncSession, event: EventFacts, *, clock: Clock = utc_now_us) -> bool:
    """Put one event into the inbox, once."""
    if _handler(event.type) is None:
        return False
    now = clock()
    values = {
        "id": event.id,
        "type": event.type,
        "object_id": event.object_id,
        "received_at": now,
        "next_attempt_at": now,
        "attempts": 0,
    }
    return await insert_or_ignore(session, StripeEvent, values)


async def process_due(sessions: Sessions, payments: Payments, *, clock: Clock = utc_now_us) -> int:
    """Handle what is due in the inbox; returns how many events are done.

    A failed one comes up again later, and does not keep the others from being handled.
    """
    async with sessions.begin() as session:
        events = await _claim(session, clock=clock)
    done = 0
    for event in events:
        error = await _handle(sessions, payments, event, clock)
        async with sessions.begin() as session:
            values = {"error": error} if error else {"processed_at": clock(), "error": None}
            await session.execute(
                update(StripeEvent).where(StripeEvent.id == event.id).values(**values)
            )
        done += error is None
    return done


async def _claim(session: AsyncSession, *, clock: Clock) -> list[StripeEvent]:
    """Take what is due, oldest first. A claim is an attempt; a dead worker's comes up again."""
    now = clock()
    found = await session.scalars(
        select(StripeEvent)
        .where(
            StripeEvent.processed_at.is_(None),
            StripeEvent.attempts < MAX_ATTEMPTS,
            StripeEvent.next_attempt_at <= now,
        )
        .order_by(StripeEvent.next_attempt_at, StripeEvent.id)
        .limit(MAX_PER_RUN)
        .with_for_update(skip_locked=True)
    )
    events = list(found)
    for event in events:
        wait_s = min(LONGEST_RETRY_S, FIRST_RETRY_S << event.attempts)
        event.next_attempt_at = now + wait_s * MICROSECONDS_PER_SECOND
        event.attempts += 1
    return events


async def _handle(
    sessions: Sessions, payments: Payments, event: StripeEvent, clock: Clock
) -> str | None:
    """Run the handler; returns why it failed, by name: the text may be about a person."""
    handler = _handler(event.type)
    assert handler is not None
    try:
        await handler(sessions, payments, event.object_id, clock)
    except Exception as fault:  # a task's seam: whatever it is, the other events go on
        error = fault.code if isinstance(fault, PlatformError) else type(fault).__name__
        logger.warning("stripe_event_failed", stripe_event=event.id, type=event.type, error=error)
        return error
    return None


def _read(payload: bytes) -> EventFacts:
    try:
        event: Any = json.loads(payload)
        return EventFacts(str(event["id"]), str(event["type"]), str(event["data"]["object"]["id"]))
    except (ValueError, LookupError, TypeError) as error:
        raise PaymentMismatch("This is no event of Stripe's.") from error


def _handler(event_type: str) -> Handler | None:
    """The handler of the longest prefix that fits."""
    fitting = [prefix for prefix in HANDLERS if event_type.startswith(prefix)]
    return HANDLERS[max(fitting, key=len)] if fitting else None


async def _checkout(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    await topups.converge_checkout(sessions, payments, object_id, clock=clock)


async def _intent(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    await topups.converge_intent(sessions, payments, object_id, clock=clock)


async def _refund(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    await refunds.converge(sessions, payments, object_id, clock=clock)


async def _charge(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    await refunds.converge_charge(sessions, payments, object_id, clock=clock)


async def _dispute(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    await disputes.converge(sessions, payments, object_id, clock=clock)


async def _card(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    async with sessions.begin() as session:
        await payment_profiles.forget_card(session, object_id)


async def _customer(sessions: Sessions, payments: Payments, object_id: str, clock: Clock) -> None:
    async with sessions.begin() as session:
        await payment_profiles.forget_customer(session, object_id)


HANDLERS: dict[str, Handler] = {
    "checkout.session.": _checkout,
    "payment_intent.": _intent,
    "refund.": _refund,
    "charge.refund.": _refund,
    "charge.refunded": _charge,
    "charge.dispute.": _dispute,
    "payment_method.detached": _card,
    "customer.deleted": _customer,
}
"""By the beginning of an event's type; the object of each is what its handler asks for."""

SWEPT_TYPES = [
    *(f"checkout.session.{end}" for end in ("completed", "expired")),
    *(f"checkout.session.async_payment_{end}" for end in ("succeeded", "failed")),
    *(f"payment_intent.{end}" for end in ("succeeded", "payment_failed", "canceled")),
    *(f"refund.{end}" for end in ("created", "updated", "failed")),
    *(f"charge.dispute.{end}" for end in ("created", "updated", "closed")),
    *(f"charge.dispute.funds_{end}" for end in ("withdrawn", "reinstated")),
    "payment_method.detached",
    "customer.deleted",
]
"""What the endpoint subscribes to, and what the sweep lists (Stripe takes 20 types at most)."""
