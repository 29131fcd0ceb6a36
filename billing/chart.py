"""The chart of accounts. Each transaction's amounts over these accounts sum to zero.

`customer:{organization}` is what we owe a customer in tokens; the others are ours.
"""

REVENUE = "revenue"
"""Use of paid credit."""
PROMOTIONAL_CONTRA = "promotional_contra"
"""Use of credit that nobody paid for: no revenue."""
PROMOTIONAL_EXPENSE = "promotional_expense"
"""Credit given away at sign-up."""
ADJUSTMENTS = "adjustments"
"""Credit given or taken by an operator, with a reason."""

BREAKAGE = "breakage"
"""Credit that nobody used before it expired."""

STRIPE_CLEARING = "stripe_clearing"
"""What Stripe has taken in for us, before its fees: less what was refunded or withdrawn."""

CUSTOMER_PREFIX = "customer:"


def customer(organization_id: str) -> str:
    """The account of one organization's credit."""
    return CUSTOMER_PREFIX + organization_id
