"""What can go wrong with money.

BillingError
├── InvalidAmount        not an amount of money, or one that no ledger could hold
├── PriceNotFound        the model has no price, so nobody may run it
├── InvalidPrice         negative, or cached input dearer than fresh input
├── InsufficientCredit   `facts["available"]`, `facts["required"]` in nano-dollars
│   └── BudgetExceeded   the budget of the key or its project is used up; same facts
├── HoldNotFound         no hold for this request
├── HoldConflict         the request id is taken by a different request
├── HoldFenced           the hold has moved on: closed, or taken over by the sweeper
├── HoldExceeded         usage beyond what was authorized; nothing was charged
├── LedgerConflict       the transaction's key is taken by a different transaction
├── LedgerUnavailable    the database cannot be reached; whether it committed is unknown
├── InvalidPeriod        no such days, or no such time zone; `facts["param"]`
├── PaymentsOff          this machine has no key of Stripe's
├── PaymentsUnavailable  Stripe cannot be reached, or failed; whether it acted is unknown
├── PaymentRefused       Stripe understood, and does not do it; `facts["reason"]`
├── CardDeclined         `facts["reason"]`, `facts["payment_intent_id"]`
├── PaymentMismatch      an object at Stripe, or a message, is not what it must be
├── TopupNotFound        this organization has no such top-up
├── RefundTooLarge       more than is left of the payment, or of the credit
└── WebhookRefused       a customer's address that we do not post to, or that refuses the notice
"""

from common.errors import PlatformError


class BillingError(PlatformError):
    code = "billing_error"


class InvalidAmount(BillingError):
    code = "invalid_amount"


class PriceNotFound(BillingError):
    code = "price_not_found"


class InvalidPrice(BillingError):
    code = "invalid_price"


class InsufficientCredit(BillingError):
    code = "insufficient_credit"


class BudgetExceeded(InsufficientCredit):
    code = "budget_exceeded"


class HoldNotFound(BillingError):
    code = "hold_not_found"


class HoldConflict(BillingError):
    code = "hold_conflict"


class HoldFenced(BillingError):
    code = "hold_fenced"


class HoldExceeded(BillingError):
    code = "hold_exceeded"


class LedgerConflict(BillingError):
    code = "ledger_conflict"


class LedgerUnavailable(BillingError):
    code = "ledger_unavailable"


class InvalidPeriod(BillingError):
    code = "invalid_period"


class PaymentsOff(BillingError):
    code = "payments_off"


class PaymentsUnavailable(BillingError):
    code = "payments_unavailable"


class PaymentRefused(BillingError):
    code = "payment_refused"


class CardDeclined(BillingError):
    code = "card_declined"


class PaymentMismatch(BillingError):
    code = "payment_mismatch"


class TopupNotFound(BillingError):
    code = "topup_not_found"


class RefundTooLarge(BillingError):
    code = "refund_too_large"


class WebhookRefused(BillingError):
    code = "webhook_refused"
