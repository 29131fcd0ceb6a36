"""Limits on logins, sign-ups and password resets, counted in Redis for all API nodes together.

This is the only place of the platform that answers "too many": inference is never throttled.
IPv6 addresses count by their /64, which is what one household or one attacker gets. When Redis
cannot be asked, nobody is let through: guessing passwords unobserved is worse than a login that
has to wait until Redis is back, and without Redis there is no inference either.
"""

import hashlib
import ipaddress
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from accounts import emails
from accounts.errors import InvalidEmail, ThrottleUnavailable, TooManyAttempts
from accounts.settings import AccountsSettings

# KEYS: counters. ARGV: window in ms, then one limit per counter.
# Returns 0, or the milliseconds until the fullest counter starts anew. Redis 6.2 has no PEXPIRE NX.
COUNT_ATTEMPT = """
local wait = 0
for i, key in ipairs(KEYS) do
    local count = redis.call('INCR', key)
    if count == 1 then redis.call('PEXPIRE', key, ARGV[1]) end
    if count > tonumber(ARGV[i + 1]) then wait = math.max(wait, redis.call('PTTL', key), 1) end
end
return wait
"""


@dataclass(frozen=True, slots=True)
class _Limit:
    name: str
    subject: str
    max_attempts: int

    @property
    def redis_key(self) -> str:
        # One hash tag: the counters of an attempt are changed by one script. Addresses of people
        # are hashed, so that Redis holds none.
        digest = hashlib.sha256(self.subject.encode()).hexdigest()[:32]
        return f"nc:{{throttle}}:{self.name}:{digest}"


class Throttle:
    """Counts attempts in fixed windows; raises TooManyAttempts past a limit."""

    def __init__(self, redis: Redis, settings: AccountsSettings) -> None:
        self._settings = settings
        self._count = redis.register_script(COUNT_ATTEMPT)

    async def login(self, *, address: str, email: str) -> None:
        """Count a login; raises TooManyAttempts(retry_after_s=…) or ThrottleUnavailable.

        The tight limit is on one network guessing one account, so that a stranger elsewhere
        cannot lock the owner out; the loose one on the account stops a botnet.
        """
        network, inbox = network_of(address), _inbox(email)
        settings = self._settings
        await self._attempt(
            settings.login_window_s,
            _Limit("login_network", network, settings.login_attempts_per_network),
            _Limit("login_email", inbox, settings.login_attempts_per_email),
            _Limit(
                "login_both", f"{network} {inbox}", settings.login_attempts_per_email_and_network
            ),
        )

    async def sign_up(self, *, address: str, email: str) -> None:
        """Count a sign-up; raises TooManyAttempts(retry_after_s=…) or ThrottleUnavailable."""
        settings = self._settings
        await self._attempt(
            settings.signup_window_s,
            _Limit("signup_network", network_of(address), settings.signups_per_network),
            _Limit("signup_email", _inbox(email), settings.signups_per_email),
        )

    async def reset_mail(self, *, address: str, email: str) -> None:
        """Count a wish for a reset mail, whether the address has an account or not; raises
        TooManyAttempts(retry_after_s=…) or ThrottleUnavailable."""
        settings = self._settings
        await self._attempt(
            settings.reset_window_s,
            _Limit("reset_mail_network", network_of(address), settings.reset_mails_per_network),
            _Limit("reset_mail_email", _inbox(email), settings.reset_mails_per_email),
        )

    async def reset(self, *, address: str) -> None:
        """Count an attempt to use a reset link: each may cost a hash. Raises as `reset_mail`."""
        settings = self._settings
        await self._attempt(
            settings.reset_window_s,
            _Limit("reset_network", network_of(address), settings.resets_per_network),
        )

    async def _attempt(self, window_s: int, *limits: _Limit) -> None:
        try:
            wait_ms = await self._count(
                keys=[limit.redis_key for limit in limits],
                args=[window_s * 1_000, *(limit.max_attempts for limit in limits)],
            )
        except (RedisError, OSError) as error:
            raise ThrottleUnavailable(
                "Attempts cannot be counted now. Please try again in a minute."
            ) from error
        if wait_ms:
            retry_after_s = -(-int(wait_ms) // 1_000)
            raise TooManyAttempts(
                f"Too many attempts. Please try again in {retry_after_s} seconds.",
                retry_after_s=retry_after_s,
            )


def network_of(address: str) -> str:
    """What counts as one caller: the IPv4 address, or the /64 of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _inbox(email: str) -> str:
    """The canonical address; a mistyped one counts under its own spelling."""
    try:
        return emails.canonical(email)
    except InvalidEmail:
        return email.strip().casefold()[: emails.MAX_LENGTH]
