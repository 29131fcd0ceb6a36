"""Settings of billing: the free credit, leases, the writer's limits."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from billing.money import NANO_PER_DOLLAR


class BillingSettings(BaseSettings):
    """`NCOMPASS_BILLING_…`."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_BILLING_", frozen=True)

    signup_credit_nano_usd: int = 100 * NANO_PER_DOLLAR
    """The free credit of a new account, once per inbox."""
    signup_credit_days: int | None = Field(default=None, ge=1)
    """The free credit ends after so many days; None: never."""

    slice_tokens: int = Field(default=512, ge=1)
    """Output of each choice that is held at once; the next slice when half of one is used."""
    credit_look_every_s: float = 1.0
    """How often an API process looks whether there is credit for what waits for it."""

    gateway_lease_s: int = 30
    """A gateway that has not renewed for so long is dead, and the sweeper closes its holds."""
    gateway_renew_every_s: float = 5.0
    sweep_every_s: float = 5.0
    outbox_every_s: float = 5.0
    reconcile_every_s: float = 3_600.0
    purge_every_s: float = 3_600.0
    stripe_inbox_every_s: float = 5.0
    recharge_every_s: float = 5.0
    payment_sweep_every_s: float = 600.0
    stripe_comparison_every_s: float = 86_400.0
    low_balance_every_s: float = 60.0
    expiry_every_s: float = 60.0

    is_private_webhook_allowed: bool = False
    """Customers' webhooks may lead to this network; for a machine of one's own only."""

    max_group: int = 128
    """Operations on holds that share one database transaction."""
    settle_patience_s: float = 60.0
    """How long a settlement is tried again while the database cannot be reached."""
