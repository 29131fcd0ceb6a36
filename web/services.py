"""What the pages need from the rest of the platform, handed to `web.app.create_app`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from accounts.api_keys import KeyRing
from accounts.passwords import PasswordHasher
from accounts.settings import AccountsSettings
from accounts.throttle import Throttle
from billing.settings import BillingSettings
from billing.stripe_client import Payments
from common.clock import Clock, utc_now_us
from common.db import Sessions
from engine.broker.gateway import GatewayBroker
from web.settings import WebSettings


@dataclass(frozen=True, slots=True)
class WebServices:
    """Everything is made by the process that starts, and closed by it too."""

    sessions: Sessions
    redis: Redis
    """Carries a new key from the form that made it to the one page that shows it."""
    password_hasher: PasswordHasher
    throttle: Throttle
    key_ring: KeyRing
    accounts_settings: AccountsSettings
    billing_settings: BillingSettings
    web_settings: WebSettings
    broker: GatewayBroker | None = None
    """None: no engine in reach; the pages then say nothing about workers."""
    payments: Payments | None = None
    """None: payments are not set up on this machine."""
    clock: Clock = utc_now_us
    api_document: Mapping[str, Any] = field(default_factory=lambda: {"paths": {}})
    """The API's OpenAPI document, which `/docs/api` shows."""
