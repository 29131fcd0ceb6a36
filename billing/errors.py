"""What can go wrong with money.

BillingError
├── InvalidAmount        not an amount of money, or one that no ledger could hold
├── PriceNotFound        the model has no price, so nobody may run it
├── InvalidPrice         negative, or cached input dearer than fresh input
├── InsufficientCredit   `facts["available"]`, `facts["required"]` in nano-dollars
├── HoldNotFound         no hold for this request
├── HoldConflict         the request id is taken by a different request
├── HoldFenced           the hold has moved on: closed, or taken over by the sweeper
├── HoldExceeded         usage beyond what was authorized; nothing was charged
├── LedgerConflict       the transaction's key is taken by a different transaction
└── LedgerUnavailable    the database cannot be reached; whether it committed is unknown
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
