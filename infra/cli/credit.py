"""credits show, credits adjust: ledger entries, never an edit."""

from typing import Annotated

import typer
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts.models import Membership, Organization
from accounts.users import find_by_email
from billing import disputes, ledger, refunds
from billing.ledger import Balance
from billing.money import format_usd, parse_usd
from billing.payment_models import NANO_USD_PER_CENT, Refund
from billing.stripe_client import Payments
from common.db import Sessions, read_only
from common.ids import new_id
from infra.cli.connections import run_in_transaction, run_with_payments
from infra.errors import WrongSettings

app = typer.Typer(no_args_is_help=True)

WhichOrganization = Annotated[
    str, typer.Option("--organization", help="An organization's id, or a member's e-mail.")
]


@app.command()
def show(organization: WhichOrganization) -> None:
    """Print what an organization has, holds and may spend."""

    async def work(session: AsyncSession) -> Balance:
        return await ledger.balance(session, await _resolve(session, organization))

    print_balance(run_in_transaction(work))


@app.command()
def adjust(
    organization: WhichOrganization,
    amount: Annotated[str, typer.Option(help="Dollars, e.g. 12.5 or -12.5.")],
    reason: Annotated[str, typer.Option(help="Why; it stands in the ledger.")],
    key: Annotated[
        str, typer.Option(help="Repeating a call with the same key changes nothing.")
    ] = "",
    is_sure: Annotated[
        bool, typer.Option("--yes", help="Do not ask before the balance goes below zero.")
    ] = False,
) -> None:
    """Give or take credit, as one ledger transaction with its reason.

    Taking more than there is asks first: below zero nothing of the organization runs.
    """
    nano_usd = parse_usd(amount)
    if nano_usd < 0 and not is_sure:
        _confirm_debt(organization, nano_usd)

    async def work(session: AsyncSession) -> Balance:
        organization_id = await _resolve(session, organization)
        await ledger.adjust_credit(
            session,
            organization_id,
            nano_usd,
            reason=reason,
            actor="operator:cli",
            key=key or new_id("adjust"),
        )
        return await ledger.balance(session, organization_id)

    print_balance(run_in_transaction(work))


@app.command()
def refund(
    topup: Annotated[str, typer.Option(help="The payment's id (`top_…`).")],
    amount: Annotated[str, typer.Option(help="Dollars, whole cents.")],
    reason: Annotated[str, typer.Option(help="Why; it stands in the audit log.")],
) -> None:
    """Give a part of a payment back to the card: the credit is taken first, then Stripe is asked."""
    cents, rest = divmod(parse_usd(amount), NANO_USD_PER_CENT)
    if rest:
        raise WrongSettings("a refund is a whole number of cents")

    async def work(sessions: Sessions, payments: Payments | None) -> Refund:
        if payments is None:
            raise WrongSettings("payments are not set up: STRIPE_API_KEY is missing")
        async with sessions.begin() as session:
            asked = await refunds.request(
                session, topup, amount_cents=cents, reason=reason, actor="operator:cli"
            )
        await refunds.send(sessions, payments, asked.id)
        async with read_only(sessions) as session:
            return await session.get_one(Refund, asked.id)

    done = run_with_payments(work)
    typer.echo(f"{done.id}  {done.state}")


@app.command()
def release(
    organization: WhichOrganization,
    reason: Annotated[str, typer.Option(help="Why; it stands in the audit log.")],
) -> None:
    """Let a frozen organization spend again, a lost dispute notwithstanding."""

    async def work(session: AsyncSession) -> None:
        organization_id = await _resolve(session, organization)
        await disputes.release(session, organization_id, reason=reason, actor="operator:cli")

    run_in_transaction(work)


def print_balance(balance: Balance) -> None:
    """One line an amount, and one to stderr where nothing can run."""
    rows = {
        "balance": balance.posted,
        "held": balance.held,
        "available": balance.available,
        "promotional": balance.promotional,
        "paid": balance.paid,
    }
    for name, amount in rows.items():
        typer.echo(f"{name:<12} {_signed(amount)}")
    if balance.posted < 0:
        typer.echo("The balance is below zero: nothing runs until it is above again.", err=True)


def _confirm_debt(organization: str, nano_usd: int) -> None:
    """Ask where the balance would go below zero; no transaction is open meanwhile. Ends on a no."""

    async def look(session: AsyncSession) -> Balance:
        return await ledger.balance(session, await _resolve(session, organization))

    posted = run_in_transaction(look).posted
    if (after := posted + nano_usd) < 0:
        typer.confirm(
            f"The balance of {organization} goes from {_signed(posted)} to {_signed(after)}, and"
            " nothing runs until it is above zero again. Go on? (--yes does not ask)",
            abort=True,
        )


def _signed(amount: int) -> str:
    return f"{'-' if amount < 0 else ''}${format_usd(abs(amount))}"


async def _resolve(session: AsyncSession, organization: str) -> str:
    """The id of the organization that is meant. Raises WrongSettings when there is none."""
    if "@" in organization:
        user = await find_by_email(session, organization)
        query = select(Membership.organization_id).where(
            Membership.user_id == (user.id if user is not None else "")
        )
    else:
        query = select(Organization.id).where(Organization.id == organization)
    found = (await session.scalars(query)).first()
    if found is None:
        raise WrongSettings(f"there is no organization {organization}")
    return found
