"""What exists at the fake Stripe, and what its dashboard and its banks can do.

Objects are dictionaries as Stripe's API writes them. Whatever changes leaves an event.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

API_VERSION = "2026-10-28.endive"

Object = dict[str, Any]

GOOD, DECLINED, NEEDS_OWNER, SLOW = (
    "4242424242424242",
    "4000000000000002",
    "4000002500003155",
    "4000008260000000",
)
"""Cards: pays; is declined; pays while its owner is there and not otherwise; pays days later."""


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, kind: str, code: str, **facts: Any) -> None:
        super().__init__(code)
        self.status = status
        self.body = {"error": {"type": kind, "code": code, "message": code, **facts}}


def invalid(code: str) -> Refused:
    return Refused(400, "invalid_request_error", code)


@dataclass
class State:
    """Everything, by id."""

    objects: dict[str, Object] = field(default_factory=dict)
    events: list[Object] = field(default_factory=list)
    moves: list[Object] = field(default_factory=list)
    """Balance transactions."""
    calls: list[str] = field(default_factory=list)
    """`POST /v1/refunds`, …: each call that was made."""
    cards: dict[str, str] = field(default_factory=dict)
    """Payment method to card number."""
    base_url: str = ""
    now_s: Callable[[], int] = lambda: int(time.time())
    _numbers: Any = field(default_factory=lambda: count(1))

    def new(self, prefix: str, kind: str, **values: Any) -> Object:
        made = {
            "id": f"{prefix}_{next(self._numbers):05}",
            "object": kind,
            "created": self.now_s(),
            "livemode": False,
            "metadata": {},
        }
        made |= values
        self.objects[made["id"]] = made
        return made

    def find(self, object_id: str, kind: str) -> Object:
        found = self.objects.get(object_id)
        if found is None or found["object"] != kind:
            raise Refused(404, "invalid_request_error", "resource_missing")
        return found

    def all(self, kind: str) -> list[Object]:
        return [found for found in self.objects.values() if found["object"] == kind]

    def tell(self, kind: str, about: Object) -> None:
        event = {
            "id": f"evt_{next(self._numbers):05}",
            "object": "event",
            "api_version": API_VERSION,
            "created": self.now_s(),
            "livemode": False,
            "type": kind,
            "data": {"object": dict(about)},
        }
        self.events.append(event)

    def move(self, kind: str, amount: int) -> Object:
        fee = 30 if kind == "charge" else 0
        made = self.new(
            "txn", "balance_transaction", type=kind, amount=amount, fee=fee, net=amount - fee
        )
        self.moves.append(made)
        return made

    # --- payments

    def create_intent(self, **values: Any) -> Object:
        empty = dict.fromkeys(
            ("latest_charge", "last_payment_error", "payment_method", "setup_future_usage")
        )
        return self.new(
            "pi",
            "payment_intent",
            status="requires_payment_method",
            amount_received=0,
            **(empty | values),
        )

    def pay(self, intent: Object, card: str, *, is_owner_there: bool) -> None:
        """Try a card; raises Refused (402) when it does not pay."""
        method = intent["payment_method"]
        if method is None:
            method = self.new(
                "pm", "payment_method", type="card", card={"brand": "visa", "last4": card[-4:]}
            )["id"]
            self.cards[method] = card
            intent["payment_method"] = method
        if card == DECLINED or (card == NEEDS_OWNER and not is_owner_there):
            code = "card_declined" if card == DECLINED else "authentication_required"
            intent["status"] = "requires_payment_method"
            intent["last_payment_error"] = {"code": code, "type": "card_error"}
            self.tell("payment_intent.payment_failed", intent)
            raise Refused(402, "card_error", code, payment_intent=dict(intent))
        if card == SLOW:
            intent["status"] = "processing"
            self.tell("payment_intent.processing", intent)
            return
        self.succeed(intent)

    def succeed(self, intent: Object) -> None:
        charge = self.new(
            "ch",
            "charge",
            payment_intent=intent["id"],
            amount=intent["amount"],
            amount_refunded=0,
            receipt_url=f"{self.base_url}/receipts/{intent['id']}",
        )
        intent |= {
            "status": "succeeded",
            "amount_received": intent["amount"],
            "latest_charge": charge["id"],
            "last_payment_error": None,
        }
        self.move("charge", intent["amount"])
        self.tell("payment_intent.succeeded", intent)

    def settle_slow_payment(self, session: Object, *, is_paid: bool) -> None:
        """A delayed method (a bank debit) comes through, or bounces."""
        intent = self.find(session["payment_intent"], "payment_intent")
        if is_paid:
            self.succeed(intent)
            session["payment_status"] = "paid"
            self.tell("checkout.session.async_payment_succeeded", session)
            return
        intent["status"] = "requires_payment_method"
        intent["last_payment_error"] = {"code": "debit_bounced", "type": "card_error"}
        self.tell("payment_intent.payment_failed", intent)
        self.tell("checkout.session.async_payment_failed", session)

    # --- the dashboard and the banks

    def charge_of(self, intent_id: str) -> Object:
        return self.find(self.find(intent_id, "payment_intent")["latest_charge"], "charge")

    def refund(self, intent_id: str, amount: int, metadata: Object | None = None) -> Object:
        charge = self.charge_of(intent_id)
        if any(d["charge"] == charge["id"] and d["status"] != "won" for d in self.all("dispute")):
            raise invalid("charge_disputed")
        if not 0 < amount <= charge["amount"] - charge["amount_refunded"]:
            raise invalid("charge_already_refunded")
        charge["amount_refunded"] += amount
        refund = self.new(
            "re",
            "refund",
            amount=amount,
            charge=charge["id"],
            payment_intent=intent_id,
            status="succeeded",
            metadata=metadata or {},
        )
        self.move("refund", -amount)
        self.tell("refund.created", refund)
        self.tell("charge.refunded", charge)
        return refund

    def fail_refund(self, refund: Object) -> None:
        refund["status"] = "failed"
        self.find(refund["charge"], "charge")["amount_refunded"] -= refund["amount"]
        self.move("refund_failure", refund["amount"])
        self.tell("refund.failed", refund)

    def open_dispute(self, intent_id: str, *, is_inquiry: bool = False) -> Object:
        charge = self.charge_of(intent_id)
        dispute = self.new(
            "dp",
            "dispute",
            amount=charge["amount"],
            charge=charge["id"],
            payment_intent=intent_id,
            status="warning_needs_response" if is_inquiry else "needs_response",
            balance_transactions=[],
        )
        self.tell("charge.dispute.created", dispute)
        if not is_inquiry:
            dispute["balance_transactions"].append(self.move("adjustment", -charge["amount"]))
            self.tell("charge.dispute.funds_withdrawn", dispute)
        return dispute

    def close_dispute(self, dispute: Object, status: str) -> None:
        dispute["status"] = status
        self.tell("charge.dispute.closed", dispute)
        if status == "won":
            dispute["balance_transactions"].append(self.move("adjustment", dispute["amount"]))
            self.tell("charge.dispute.funds_reinstated", dispute)

    def detach(self, method_id: str) -> None:
        method = self.find(method_id, "payment_method")
        self.cards[method_id] = DECLINED
        self.tell("payment_method.detached", method)
