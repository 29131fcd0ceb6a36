"""Celery's tasks: each runs one async domain function, and is safe to run twice or at once."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from accounts import email_tokens, password_reset, verification
from accounts import sessions as logins
from accounts.mail import Mailer
from accounts.settings import AccountsSettings
from billing import (
    alerts,
    expiry,
    outbox_relay,
    payment_mail,
    payment_sweeps,
    recharge,
    reconcile,
    sweeps,
    webhooks,
)
from billing.celery_app import app
from billing.settings import BillingSettings
from billing.stripe_client import Payments
from billing.stripe_settings import StripeSettings
from common.db import Sessions, create_engine, create_sessions, read_only
from common.settings import CommonSettings

logger = structlog.get_logger(__name__)

Result = TypeVar("Result")


@app.task
def close_lost_gateways() -> None:
    """Void the holds of API processes that are gone, in as many transactions as it takes."""
    closed = run(sweeps.close_all_lost)
    if closed:
        logger.warning("holds_closed", count=closed, reason="their gateway is gone")


@app.task
def relay_outbox() -> None:
    """Deliver what transactions have promised."""
    settings = AccountsSettings()
    mailer = Mailer(settings)
    handlers = {
        verification.TOPIC: partial(verification.deliver, mailer=mailer, settings=settings),
        password_reset.TOPIC: partial(password_reset.deliver, mailer=mailer, settings=settings),
        payment_mail.TOPIC: partial(payment_mail.deliver, mailer=mailer, settings=settings),
        alerts.TOPIC: partial(
            alerts.deliver,
            peppers=settings.api_key_peppers,
            is_private_allowed=BillingSettings().is_private_webhook_allowed,
        ),
    }
    run(partial(outbox_relay.deliver_due, handlers=handlers))


@app.task
def process_stripe_inbox() -> None:
    """Converge to the objects that Stripe's webhooks were about."""
    run_with_stripe(webhooks.process_due)


@app.task
def recharge_due() -> None:
    """Charge the saved cards of organizations whose credit has fallen below their threshold."""
    run_with_stripe(recharge.run_due)


@app.task
def sweep_payments() -> None:
    """Fetch what Stripe's webhooks did not bring."""
    run_with_stripe(payment_sweeps.sweep)


@app.task
def compare_with_stripe() -> None:
    """Our clearing account against Stripe's own list of what has moved, to the cent."""
    check = run_with_stripe(payment_sweeps.compare_with_stripe)
    if check is not None and not check.is_ok:
        logger.error("books_differ", check=check.name, detail=check.detail)


@app.task
def warn_low_balances() -> None:
    """Promise mails and webhooks to whoever's credit has fallen below their threshold."""
    run(alerts.sweep)


@app.task
def expire_credit() -> None:
    """Take back the credit whose time is over."""
    run(expiry.sweep)


@app.task
def reconcile_books() -> None:
    """Prove that the books are right, or say loudly that they are not."""
    checks = run(_reconcile)
    for check in checks:
        if not check.is_ok:
            logger.error("books_differ", check=check.name, detail=check.detail)
    logger.info("books_checked", checks=len(checks), failed=sum(not c.is_ok for c in checks))


@app.task
def purge_expired() -> None:
    """Delete what time has made worthless: sessions, mail tokens, leases of dead gateways."""
    run(_purge)


def run(work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Run async work in this synchronous process, on connections of its own."""

    async def main() -> Result:
        engine = create_engine(CommonSettings().database_url.get_secret_value())
        try:
            return await work(create_sessions(engine))
        finally:
            await engine.dispose()

    return asyncio.run(main())


def run_with_stripe(work: Callable[[Sessions, Payments], Awaitable[Result]]) -> Result | None:
    """The same for work at Stripe; nothing, and None, where payments are not set up."""
    settings = StripeSettings()
    if not settings.is_on:
        return None

    async def main(sessions: Sessions) -> Result:
        payments = Payments(settings)
        try:
            return await work(sessions, payments)
        finally:
            await payments.close()

    return run(main)


async def _reconcile(sessions: Sessions) -> list[reconcile.Check]:
    async with read_only(sessions) as session:
        return await reconcile.reconcile(session)


async def _purge(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await logins.purge_expired(session)
        await email_tokens.purge_expired(session)
        await sweeps.forget_dead_gateways(session)
