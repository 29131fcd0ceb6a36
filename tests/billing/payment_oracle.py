"""An independent idea of what payments do to credit. Shares no code with billing.

`truth` is what the customer, their bank and Stripe have done; `hear` is what must follow from it once
we have heard, however often and in whatever order.
"""

from dataclasses import dataclass, field

from tests.billing.oracle import Oracle

CENT = 10_000_000


@dataclass
class OracleRefund:
    cents: int
    has_failed: bool = False
    is_taken: bool = False
    is_given_back: bool = False


@dataclass
class OracleDispute:
    is_inquiry: bool
    end: str = ""
    """`won`, `lost`, `closed`; nothing while it is open."""
    heard: str | None = None
    """What we knew last."""
    is_away: bool = False
    is_freezing: bool = False


@dataclass
class OraclePayment:
    """One payment at Stripe."""

    cents: int
    is_paid: bool = False
    is_credited: bool = False
    refunds: list[OracleRefund] = field(default_factory=list)
    dispute: OracleDispute | None = None

    @property
    def left(self) -> int:
        """Cents that may still be refunded."""
        return self.cents - sum(r.cents for r in self.refunds if not r.has_failed)


@dataclass
class OracleRecharge:
    is_on: bool = False
    threshold: int = 0
    cents: int = 0
    cap: int = 0
    failures: int = 0
    charged: list[tuple[str, int]] = field(default_factory=list)
    """Month and cents."""


@dataclass
class OraclePayments:
    """Everything at Stripe, and what we owe because of it."""

    oracle: Oracle
    payments: list[OraclePayment] = field(default_factory=list)
    recharge: OracleRecharge = field(default_factory=OracleRecharge)

    @property
    def disputes(self) -> list[OracleDispute]:
        return [payment.dispute for payment in self.payments if payment.dispute]

    def hear(self) -> None:
        """Bring the credit to where the payments are."""
        for payment in self.payments:
            self._hear_payment(payment)
        self.oracle.is_frozen = any(dispute.is_freezing for dispute in self.disputes)

    def _hear_payment(self, payment: OraclePayment) -> None:
        if payment.is_paid and not payment.is_credited:
            payment.is_credited = True
            self.oracle.give(payment.cents * CENT, is_paid=True)
        for refund in payment.refunds:
            self._hear_refund(refund)
        if payment.dispute is not None:
            self._hear_dispute(payment.dispute, payment.cents)

    def _hear_refund(self, refund: OracleRefund) -> None:
        if not refund.is_taken:
            refund.is_taken = True
            self.oracle.take(refund.cents * CENT, is_paid_first=True)
        if refund.has_failed and not refund.is_given_back:
            refund.is_given_back = True
            self.oracle.give(refund.cents * CENT, is_paid=True)

    def _hear_dispute(self, dispute: OracleDispute, cents: int) -> None:
        must_be_away = not dispute.is_inquiry and dispute.end != "won"
        if must_be_away and not dispute.is_away:
            self.oracle.take(cents * CENT, is_paid_first=True)
        elif dispute.is_away and not must_be_away:
            self.oracle.give(cents * CENT, is_paid=True)
        dispute.is_away = must_be_away
        if dispute.heard != dispute.end:
            dispute.heard = dispute.end
            dispute.is_freezing = must_be_away
            if must_be_away:
                self.recharge.is_on = False

    def release(self) -> None:
        """An operator trusts again."""
        for dispute in self.disputes:
            dispute.is_freezing = False
        self.oracle.is_frozen = False

    def run_recharge(self, month: str, outcome: str) -> None:
        """One due recharge, whose card does `outcome`: pays, declined, owner."""
        recharge = self.recharge
        spent = sum(cents for when, cents in recharge.charged if when == month)
        is_due = (
            recharge.is_on
            and not self.oracle.is_frozen
            and self.oracle.available < max(recharge.threshold, 10 * CENT)
            and spent + recharge.cents <= recharge.cap
        )
        if not is_due:
            return
        if outcome == "pays":
            self.payments.append(OraclePayment(recharge.cents, is_paid=True))
            self._hear_payment(self.payments[-1])
            recharge.charged.append((month, recharge.cents))
            recharge.failures = 0
            return
        recharge.failures += 1
        if outcome == "owner" or recharge.failures == 3:
            recharge.is_on = False
