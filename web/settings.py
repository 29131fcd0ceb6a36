"""Settings of the web pages."""

from pydantic import AnyHttpUrl, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class WebSettings(BaseSettings):
    """`NCOMPASS_WEB_…`. Only the cookie secret has no default."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_WEB_", frozen=True)

    cookie_secret: SecretStr
    """Signs the forms of visitors who have no session yet; the same on every node."""
    is_tls: bool = False
    """Browsers reach us by https: cookies get `Secure` and `__Host-`, answers get HSTS."""
    public_url: AnyHttpUrl | None = None
    """Where browsers and API clients reach us, e.g. `https://api.example.com`. Unset: the address
    that the browser used. Shown in examples; forms are accepted from it and from that address."""
    checkout_origin: str = "https://checkout.stripe.com"
    """Where the top-up form may lead; browsers ask before they follow a form's redirect."""
    max_form_bytes: int = 65_536
    recent_requests: int = 40
    """Rows of the request list on the usage page."""
    usage_days: int = 30
    """Days of the usage chart."""
    key_handover_s: int = 60
    """How long a new key waits in Redis (half of it; see `web/one_time.py`) to be shown once."""
