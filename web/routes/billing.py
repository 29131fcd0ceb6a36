"""Billing: the balance, top-ups, automatic recharge, warnings, the ledger and the receipts."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sqlalchemy.ext.asyncio import AsyncSession

from billing import alerts, ledger, lots, payment_profiles, topups
from billing.errors import (
    BillingError,
    InvalidAmount,
    InvalidPeriod,
    LedgerConflict,
    PaymentMismatch,
    PaymentRefused,
    PaymentsOff,
    PaymentsUnavailable,
    WebhookRefused,
)
from billing.exports import MOVEMENT_COLUMNS, movements
from billing.money import format_usd, parse_usd
from billing.payment_models import NANO_USD_PER_CENT, BalanceAlert, PaymentProfile
from billing.recharge import charged_this_month
from billing.topups import ReturnPages
from common.db import read_only
from common.ids import new_id
from web import exports
from web.dependencies import Account, Posted, Services, SignedIn
from web.forms import FormState, PostedForm
from web.pages import get_pages
from web.redirects import see_other
from web.services import WebServices
from web.snippets import base_url

router = APIRouter()

SHOWN_TRANSACTIONS = 50
SHOWN_TOPUPS = 20
MISTAKES = (InvalidAmount, LedgerConflict, PaymentRefused, WebhookRefused)


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of the page; the one that was sent has what was typed and what is wrong."""

    topup: FormState
    recharge: FormState
    alerts: FormState
    export: FormState


@router.api_route("/billing", methods=["GET", "HEAD"])
async def show_billing(request: Request, services: Services, account: SignedIn) -> Response:
    """Everything about the organization's money."""
    return await _render(request, services, account)


@router.api_route("/billing/export", methods=["GET", "HEAD"])
async def export_ledger(request: Request, services: Services, account: SignedIn) -> Response:
    """Every movement of the credit in some days, as a file."""
    form = exports.asked(request, services.clock)
    try:
        period = exports.period_of(form, services.clock)
    except InvalidPeriod as error:
        return await _render(request, services, account, export=exports.wrong(form, error))
    pages = movements(services.sessions, account.organization_id, period)
    return exports.answer("ledger", form, period, MOVEMENT_COLUMNS, pages)


@router.post("/billing/topup")
async def top_up(
    request: Request, services: Services, account: SignedIn, posted: Posted
) -> Response:
    """Start a top-up and go to Stripe's page; the form's key makes a double click one payment."""
    try:
        payments = services.payments
        amount_cents = _cents(posted, "amount")
        if payments is None:
            raise PaymentsOff("Payments are not set up on this machine.")
        async with services.sessions.begin() as session:
            topup = await topups.start(
                session,
                account.organization_id,
                amount_cents=amount_cents,
                idempotency_key=posted.text("click")[:64] or new_id("click"),
                clock=services.clock,
            )
        assert topup is not None
        origin = base_url(request, services.web_settings).removesuffix("/v1")
        url = await topups.open_checkout(
            services.sessions,
            payments,
            topup.id,
            email=account.email,
            is_card_saved=posted.text("save_card") == "on",
            pages=ReturnPages(
                success=f"{origin}/billing/return?topup={topup.id}", cancel=f"{origin}/billing"
            ),
        )
    except (*MISTAKES, PaymentsOff, PaymentsUnavailable, PaymentMismatch) as error:
        return await _render(request, services, account, topup=_wrong(posted, error, "amount"))
    return see_other(url)


@router.api_route("/billing/return", methods=["GET", "HEAD"])
async def return_from_stripe(request: Request, services: Services, account: SignedIn) -> Response:
    """Where Stripe's page leads back to: ask at once, so that the credit is there to be seen.

    If Stripe does not answer now, its webhook or the sweep will bring the credit.
    """
    topup_id = request.query_params.get("topup", "")[:64]
    async with read_only(services.sessions) as session:
        topup = await topups.find(session, account.organization_id, topup_id)
    if services.payments is not None and topup.session_id is not None:
        try:
            await topups.converge_checkout(
                services.sessions, services.payments, topup.session_id, clock=services.clock
            )
        except (PaymentsUnavailable, PaymentMismatch):
            return see_other("/billing", waiting="1")
    return see_other("/billing")


@router.post("/billing/recharge")
async def set_recharge(
    request: Request, services: Services, account: SignedIn, posted: Posted
) -> Response:
    """Switch automatic recharge on or off, and say how much."""
    try:
        async with services.sessions.begin() as session:
            await payment_profiles.set_recharge(
                session,
                account.organization_id,
                is_on=posted.text("is_on") == "on",
                threshold_cents=_cents(posted, "threshold"),
                amount_cents=_cents(posted, "recharge"),
                month_cap_cents=_cents(posted, "month_cap"),
                clock=services.clock,
            )
    except MISTAKES as error:
        field = {"amount": "recharge"}.get(error.facts.get("field", ""), error.facts.get("field"))
        state = _wrong(posted, error, field or "")
        return await _render(request, services, account, recharge=state)
    return see_other("/billing")


@router.post("/billing/alerts")
async def set_alerts(
    request: Request, services: Services, account: SignedIn, posted: Posted
) -> Response:
    """Say when, and where beside the mail, to tell that the credit runs low."""
    try:
        async with services.sessions.begin() as session:
            await alerts.configure(
                session,
                account.organization_id,
                threshold_nano_usd=_cents(posted, "below") * NANO_USD_PER_CENT,
                webhook_url=posted.text("webhook_url") or None,
            )
    except MISTAKES as error:
        field = "webhook_url" if isinstance(error, WebhookRefused) else "below"
        return await _render(request, services, account, alerts=_wrong(posted, error, field))
    return see_other("/billing")


async def _render(
    request: Request, services: WebServices, account: Account, **wrong: FormState
) -> Response:
    organization_id = account.organization_id
    async with read_only(services.sessions) as session:
        profile = await payment_profiles.find_profile(session, organization_id)
        alert = await alerts.find(session, organization_id)
        page = await _figures(session, organization_id, services)
    forms = Forms(
        topup=wrong.get("topup") or FormState(values={"amount": "25.00"}),
        recharge=wrong.get("recharge") or _recharge_form(profile),
        alerts=wrong.get("alerts") or _alerts_form(alert),
        export=wrong.get("export") or exports.asked(request, services.clock),
    )
    peppers = services.accounts_settings.api_key_peppers
    has_webhook = alert is not None and alert.webhook_url is not None
    return get_pages(request).render(
        request,
        "billing.html",
        account.visitor,
        status_code=422 if wrong else 200,
        forms=forms,
        profile=profile,
        is_on=services.payments is not None,
        is_waiting="waiting" in request.query_params,
        click=new_id("click"),
        webhook_secret=alerts.secret_of(organization_id, peppers) if has_webhook else None,
        **page,
    )


async def _figures(
    session: AsyncSession, organization_id: str, services: WebServices
) -> dict[str, Any]:
    return {
        "balance": await ledger.balance(session, organization_id),
        "ending": await lots.next_end(session, organization_id),
        "transactions": await ledger.entries(session, organization_id, SHOWN_TRANSACTIONS),
        "topups": await topups.recent(session, organization_id, SHOWN_TOPUPS),
        "charged_nano_usd": NANO_USD_PER_CENT
        * await charged_this_month(session, organization_id, services.clock()),
    }


def _recharge_form(profile: PaymentProfile | None) -> FormState:
    if profile is None:
        defaults = (
            payment_profiles.DEFAULT_THRESHOLD_CENTS,
            payment_profiles.DEFAULT_RECHARGE_CENTS,
            payment_profiles.DEFAULT_MONTH_CAP_CENTS,
        )
        values = dict(
            zip(("threshold", "recharge", "month_cap"), map(_dollars, defaults), strict=True)
        )
        return FormState(values=values)
    return FormState(
        values={
            "is_on": "on" if profile.is_recharge_on else "",
            "threshold": _dollars(profile.recharge_threshold_nano_usd // NANO_USD_PER_CENT),
            "recharge": _dollars(profile.recharge_cents),
            "month_cap": _dollars(profile.recharge_month_cap_cents),
        }
    )


def _alerts_form(alert: BalanceAlert | None) -> FormState:
    threshold = alerts.DEFAULT_THRESHOLD_NANO_USD if alert is None else alert.threshold_nano_usd
    return FormState(
        values={
            "below": _dollars(threshold // NANO_USD_PER_CENT),
            "webhook_url": (alert.webhook_url if alert else None) or "",
        }
    )


def _dollars(cents: int) -> str:
    return format_usd(cents * NANO_USD_PER_CENT)[:-7]


def _cents(posted: PostedForm, name: str) -> int:
    """Whole cents of a field in dollars; raises InvalidAmount."""
    try:
        amount = parse_usd(posted.text(name).removeprefix("$"))
    except InvalidAmount:
        raise InvalidAmount("Write dollars, such as 25 or 25.50.", field=name) from None
    if amount % NANO_USD_PER_CENT or amount < 0:
        raise InvalidAmount("Write whole cents, such as 25.50.", field=name)
    return amount // NANO_USD_PER_CENT


def _wrong(posted: PostedForm, error: BillingError, field: str) -> FormState:
    names = ("amount", "save_card", "is_on", "threshold", "recharge", "month_cap", "below")
    values = {name: posted.text(name) for name in (*names, "webhook_url")}
    is_about_field = not isinstance(error, PaymentRefused | PaymentsOff | PaymentsUnavailable)
    return FormState(values=values, errors={field if is_about_field else "": error.message})
