"""Mails about money, to the owners of an organization. Promised with the deed, sent by the relay."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.mail import Mailer
from accounts.models import Membership, User
from accounts.settings import AccountsSettings
from billing import ledger
from billing.money import format_usd
from billing.payment_models import Dispute, Topup
from common import outbox
from common.clock import Clock, utc_now_us
from common.db import Sessions, read_only

TOPIC = "payment_mail"

TEMPLATES = {
    "receipt": (
        "Receipt: ${amount} of credit",
        "We have received ${amount}. Your credit is ${available}.\n\nReceipt: {receipt}\n",
    ),
    "recharge_failed": (
        "Your card could not be charged",
        "We tried to recharge your credit by ${amount}, and your bank said: {failure}.\n"
        "Your credit is ${available}. Nothing was charged.\n\n"
        "If this was the third time in a row, or your bank wants you to confirm the payment,\n"
        "automatic recharge is now off. Add credit by hand and switch it on again here:\n"
        "{link}\n",
    ),
    "low_balance": (
        "Your credit runs low: ${available} left",
        "Your credit is ${available}. At zero, requests are answered 402 and running ones pause.\n\n"
        "Add credit, or let it recharge by itself: {link}\n",
    ),
    "dispute_withdrawn": (
        "A payment of yours is disputed",
        "The owner of a card has contested a payment of ${amount}, and the bank has taken it back.\n"
        "Your credit is ${available}, and new requests are refused until this is decided.\n"
        "If this is a mistake, tell your bank.\n",
    ),
    "dispute_reinstated": (
        "A disputed payment has come back",
        "The payment of ${amount} is yours again. Your credit is ${available}.\n",
    ),
}
"""Subject and body by name."""


async def promise(
    session: AsyncSession,
    template: str,
    organization_id: str,
    *,
    about: str,
    clock: Clock = utc_now_us,
) -> bool:
    """Promise a mail, in the caller's transaction; False when it was promised before."""
    assert template in TEMPLATES
    return await outbox.promise(
        session,
        topic=TOPIC,
        key=f"{template}:{about}",
        payload={"template": template, "organization_id": organization_id, "about": about},
        clock=clock,
    )


async def deliver(
    sessions: Sessions, payload: dict[str, Any], *, mailer: Mailer, settings: AccountsSettings
) -> None:
    """The outbox's handler: write the mail from the tables, and send it to every owner."""
    organization_id = payload["organization_id"]
    async with read_only(sessions) as session:
        words = await _words(session, organization_id, payload["about"])
        found = await session.scalars(
            select(User.email)
            .join(Membership, Membership.user_id == User.id)
            .where(Membership.organization_id == organization_id, Membership.role == "owner")
            .order_by(User.id)
        )
        addresses = list(found)
    words["link"] = f"{settings.public_base_url.rstrip('/')}/billing"
    subject, body = (text.format(**words) for text in TEMPLATES[payload["template"]])
    for address in addresses:
        await mailer.send(to=address, subject=subject, body=body)


async def _words(session: AsyncSession, organization_id: str, about: str) -> dict[str, str]:
    balance = await ledger.balance(session, organization_id)
    topup = await session.get(Topup, about)
    dispute = await session.get(Dispute, about)
    cents = topup.amount_cents if topup else dispute.amount_cents if dispute else 0
    return {
        "available": _cents_of(balance.available),
        "amount": f"{cents // 100}.{cents % 100:02}",
        "receipt": (topup.receipt_url if topup else None) or "on your billing page",
        "failure": ((topup.failure if topup else None) or "no").replace("_", " "),
    }


def _cents_of(amount: int) -> str:
    """Whole cents, rounded down in size: a mail is no statement."""
    return format_usd(amount)[:-7]
