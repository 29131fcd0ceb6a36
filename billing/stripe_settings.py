"""Settings of Stripe. Without a key the platform runs, and takes no payments."""

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class StripeSettings(BaseSettings):
    """`STRIPE_…`."""

    model_config = SettingsConfigDict(env_prefix="STRIPE_", frozen=True)

    api_key: SecretStr | None = None
    """A secret or restricted key. None: `/billing` says that payments are not set up."""
    webhook_secret: SecretStr | None = None
    """Of the endpoint `/v1/webhooks/stripe`. None: webhooks are refused, the sweeps do their work."""
    api_base: str = "https://api.stripe.com"
    timeout_s: float = 20.0
    max_network_retries: int = 2
    """Stripe's library repeats a call with the same idempotency key."""

    @property
    def is_on(self) -> bool:
        """Payments are set up on this machine."""
        return self.api_key is not None
