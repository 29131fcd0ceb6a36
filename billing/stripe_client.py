"""Stripe as this product uses it: a few calls, each answered in types of our own.

Built for stripe-python 16 (`StripeClient`, API version pinned by the library). Amounts are cents.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import stripe
from stripe import StripeClient

from billing.errors import CardDeclined, PaymentMismatch, PaymentRefused, PaymentsUnavailable
from billing.stripe_settings import StripeSettings

AUTHENTICATION_REQUIRED = "authentication_required"
"""The card's bank wants its owner to be there (SCA)."""
CONFLICT = 409
MOVES_OF_CHARGES = frozenset({"charge", "payment"})
MOVES_OF_REFUNDS = frozenset(
    {"refund", "payment_refund", "refund_failure", "payment_failure_refund"}
)
MOVES_OF_DISPUTES = frozenset({"adjustment"})


@dataclass(frozen=True, slots=True)
class Checkout:
    """A page of Stripe's on which a customer pays."""

    id: str
    topup_id: str | None
    url: str | None
    status: str | None
    payment_status: str
    payment_intent_id: str | None
    amount_subtotal: int | None
    currency: str | None


@dataclass(frozen=True, slots=True)
class Intent:
    """A payment, from the first attempt to its end."""

    id: str
    status: str
    amount_cents: int
    currency: str
    topup_id: str | None
    payment_method_id: str | None
    is_card_saved: bool
    receipt_url: str | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class RefundFacts:
    """A refund as Stripe has it. `refund_id` is ours, if it was we who asked for it."""

    id: str
    payment_intent_id: str | None
    amount_cents: int
    status: str
    refund_id: str | None


@dataclass(frozen=True, slots=True)
class DisputeFacts:
    """A dispute as Stripe has it; `withdrawn_cents` are away from our account now."""

    id: str
    payment_intent_id: str | None
    amount_cents: int
    status: str
    withdrawn_cents: int


@dataclass(frozen=True, slots=True)
class EventFacts:
    """Which object changed."""

    id: str
    type: str
    object_id: str


class Payments:
    """Our side of Stripe. Raises CardDeclined, PaymentRefused, PaymentsUnavailable.

    Every call that creates something carries an idempotency key that names our own row, so that a
    call whose answer was lost can be repeated.
    """

    def __init__(self, settings: StripeSettings) -> None:
        assert settings.api_key is not None, "payments are not set up"
        self._http = stripe.HTTPXClient(timeout=settings.timeout_s)
        client = StripeClient(
            settings.api_key.get_secret_value(),
            base_addresses={"api": settings.api_base},
            http_client=self._http,
            max_network_retries=settings.max_network_retries,
        )
        # The library makes its services' classes when they are first asked for.
        self._stripe: Any = client.v1

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.close_async()  # type: ignore[no-untyped-call]  # the library leaves it untyped

    async def create_customer(self, organization_id: str, *, email: str) -> str:
        """The id of the organization's customer."""
        with _translated():
            customer = await self._stripe.customers.create_async(
                {"email": email, "metadata": {"organization_id": organization_id}},
                {"idempotency_key": f"customer:{organization_id}"},
            )
        return str(customer.id)

    async def create_checkout(
        self,
        topup_id: str,
        *,
        amount_cents: int,
        customer_id: str,
        is_card_saved: bool,
        success_url: str,
        cancel_url: str,
    ) -> Checkout:
        """A page to pay this top-up on."""
        intent: dict[str, Any] = {"metadata": {"topup_id": topup_id}}
        if is_card_saved:
            intent["setup_future_usage"] = "off_session"
        product = {"name": "nCompass credit"}
        price = {"currency": "usd", "unit_amount": amount_cents, "product_data": product}
        with _translated():
            session = await self._stripe.checkout.sessions.create_async(
                {
                    "mode": "payment",
                    "customer": customer_id,
                    "client_reference_id": topup_id,
                    "line_items": [{"quantity": 1, "price_data": price}],
                    "payment_intent_data": intent,
                    "success_url": success_url,
                    "cancel_url": cancel_url,
                },
                {"idempotency_key": f"topup:{topup_id}"},
            )
        return _checkout(session)

    async def retrieve_checkout(self, session_id: str) -> Checkout:
        """How that page stands now."""
        with _translated():
            return _checkout(await self._stripe.checkout.sessions.retrieve_async(session_id))

    async def retrieve_intent(self, payment_intent_id: str) -> Intent:
        """How that payment stands now, with its receipt."""
        with _translated():
            return _intent(
                await self._stripe.payment_intents.retrieve_async(
                    payment_intent_id, {"expand": ["latest_charge"]}
                )
            )

    async def charge_saved_card(
        self, topup_id: str, *, amount_cents: int, customer_id: str, payment_method_id: str
    ) -> Intent:
        """Charge the saved card while its owner is away; raises CardDeclined."""
        with _translated():
            return _intent(
                await self._stripe.payment_intents.create_async(
                    {
                        "amount": amount_cents,
                        "currency": "usd",
                        "customer": customer_id,
                        "payment_method": payment_method_id,
                        "off_session": True,
                        "confirm": True,
                        "metadata": {"topup_id": topup_id},
                        "expand": ["latest_charge"],
                    },
                    {"idempotency_key": f"recharge:{topup_id}"},
                )
            )

    async def cancel_intent(self, payment_intent_id: str) -> None:
        """Make sure that nothing comes of it; raises PaymentRefused when something has."""
        with _translated():
            await self._stripe.payment_intents.cancel_async(payment_intent_id)

    async def find_intents(self, topup_id: str) -> list[Intent]:
        """Payments of this top-up, when all that we know is that we asked for one."""
        with _translated():
            found = await self._stripe.payment_intents.search_async(
                {"query": f"metadata['topup_id']:'{topup_id}'", "expand": ["data.latest_charge"]}
            )
        return [_intent(intent) for intent in found.data]

    async def describe_card(self, payment_method_id: str) -> str:
        """`visa 4242`."""
        with _translated():
            method = await self._stripe.payment_methods.retrieve_async(payment_method_id)
        card = getattr(method, "card", None)
        return str(method.type) if card is None else f"{card.brand} {card.last4}"

    async def create_refund(
        self, refund_id: str, *, payment_intent_id: str, amount_cents: int
    ) -> RefundFacts:
        """Give a part of a payment back."""
        with _translated():
            return _refund(
                await self._stripe.refunds.create_async(
                    {
                        "payment_intent": payment_intent_id,
                        "amount": amount_cents,
                        "metadata": {"refund_id": refund_id},
                    },
                    {"idempotency_key": f"refund:{refund_id}"},
                )
            )

    async def retrieve_refund(self, stripe_refund_id: str) -> RefundFacts:
        """How that refund stands now."""
        with _translated():
            return _refund(await self._stripe.refunds.retrieve_async(stripe_refund_id))

    async def list_refunds(self, charge_id: str) -> list[RefundFacts]:
        """Every refund of a charge."""
        with _translated():
            found = await self._stripe.refunds.list_async({"charge": charge_id, "limit": 100})
            return [_refund(refund) async for refund in found.auto_paging_iter()]

    async def retrieve_dispute(self, dispute_id: str) -> DisputeFacts:
        """How that dispute stands now."""
        with _translated():
            dispute = await self._stripe.disputes.retrieve_async(dispute_id)
        return DisputeFacts(
            id=str(dispute.id),
            payment_intent_id=_id_of(dispute.payment_intent),
            amount_cents=int(dispute.amount),
            status=str(dispute.status),
            withdrawn_cents=-sum(int(move.amount) for move in dispute.balance_transactions),
        )

    async def list_events(self, *, since_s: int, types: list[str]) -> list[EventFacts]:
        """What has changed since then (seconds since the epoch); Stripe keeps 30 days."""
        with _translated():
            found = await self._stripe.events.list_async(
                {"created": {"gte": since_s}, "types": types, "limit": 100}
            )
            return [
                EventFacts(str(event.id), str(event.type), str(event.data.object["id"]))
                async for event in found.auto_paging_iter()
            ]

    async def cents_by_kind(self) -> dict[str, int]:
        """All money that has moved at Stripe, before fees: of payments, refunds and disputes."""
        kinds = {"payments": MOVES_OF_CHARGES, "refunds": MOVES_OF_REFUNDS}
        kinds["disputes"] = MOVES_OF_DISPUTES
        cents = dict.fromkeys(kinds, 0)
        with _translated():
            found = await self._stripe.balance_transactions.list_async({"limit": 100})
            async for move in found.auto_paging_iter():
                for kind, types in kinds.items():
                    if move.type in types:
                        cents[kind] += int(move.amount)
        return cents


def verify_signature(payload: bytes, header: str, secret: str) -> None:
    """Raise PaymentMismatch unless Stripe has signed these very bytes in the last five minutes."""
    try:
        stripe.WebhookSignature.verify_header(payload, header, secret, 300)
    except (stripe.SignatureVerificationError, UnicodeDecodeError) as error:
        raise PaymentMismatch("This is not signed by Stripe.") from error


@contextmanager
def _translated() -> Iterator[None]:
    """Stripe's errors as ours. None of them repeats what Stripe wrote about the card's owner."""
    try:
        yield
    except stripe.CardError as error:
        intent = getattr(error.error, "payment_intent", None)
        raise CardDeclined(
            "The card was declined.",
            reason=error.code or "card_declined",
            payment_intent_id=None if intent is None else str(intent.id),
        ) from error
    except (stripe.InvalidRequestError, stripe.IdempotencyError) as error:
        if error.http_status == CONFLICT:  # the first call with this key is still running
            raise PaymentsUnavailable("Stripe is still busy with this.", error="busy") from error
        raise PaymentRefused("Stripe refused the call.", reason=error.code or "refused") from error
    except stripe.StripeError as error:
        raise PaymentsUnavailable(
            "Stripe cannot be reached, or failed.", error=type(error).__name__
        ) from error


def _checkout(session: Any) -> Checkout:
    return Checkout(
        id=str(session.id),
        topup_id=session.client_reference_id,
        url=session.url,
        status=session.status,
        payment_status=str(session.payment_status),
        payment_intent_id=_id_of(session.payment_intent),
        amount_subtotal=session.amount_subtotal,
        currency=session.currency,
    )


def _intent(intent: Any) -> Intent:
    charge = intent.latest_charge
    failure = intent.last_payment_error
    return Intent(
        id=str(intent.id),
        status=str(intent.status),
        amount_cents=int(intent.amount_received),
        currency=str(intent.currency),
        topup_id=intent.metadata.to_dict().get("topup_id"),
        payment_method_id=_id_of(intent.payment_method),
        is_card_saved=intent.setup_future_usage == "off_session",
        receipt_url=None if charge is None or isinstance(charge, str) else charge.receipt_url,
        failure=None if failure is None else str(failure.code),
    )


def _refund(refund: Any) -> RefundFacts:
    return RefundFacts(
        id=str(refund.id),
        payment_intent_id=_id_of(refund.payment_intent),
        amount_cents=int(refund.amount),
        status=str(refund.status),
        refund_id=refund.metadata.to_dict().get("refund_id"),
    )


def _id_of(value: Any) -> str | None:
    """Stripe gives an id, or the object itself when it was asked to expand it."""
    return value if value is None or isinstance(value, str) else str(value.id)
