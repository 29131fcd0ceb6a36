"""Telling an organization that its credit runs low: by mail and, if it wants, by a signed webhook.

Once for each time that it falls below the threshold. The webhook is signed as Stripe signs theirs:
`nCompass-Signature: t=<seconds>,v1=<HMAC-SHA256 of "t.body">`.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
import httpx
from pydantic import SecretStr
from sqlalchemy import exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from billing import ledger, payment_mail
from billing.errors import InvalidAmount, WebhookRefused
from billing.models import Balance, CreditLot
from billing.money import format_usd
from billing.payment_models import BalanceAlert
from common import outbox
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.db import Sessions, read_only
from common.upsert import insert_or_ignore

TOPIC = "low_balance_webhook"
DEFAULT_THRESHOLD_NANO_USD = 5_000_000_000
MAX_THRESHOLD_NANO_USD = 10**15
MAX_URL_LENGTH = 500
MAX_PER_RUN = 200
TIMEOUT_S = 10


async def find(session: AsyncSession, organization_id: str) -> BalanceAlert | None:
    """The organization's wishes, once it has any or has been told."""
    return await session.get(BalanceAlert, organization_id)


async def configure(
    session: AsyncSession, organization_id: str, *, threshold_nano_usd: int, webhook_url: str | None
) -> BalanceAlert:
    """Set when and where to tell; raises InvalidAmount, WebhookRefused."""
    if not 0 <= threshold_nano_usd <= MAX_THRESHOLD_NANO_USD:
        raise InvalidAmount("The threshold is $0 at least and $1,000,000 at most.")
    if webhook_url is not None:
        require_plain_url(webhook_url)
    alert = await _ensure(session, organization_id)
    alert.threshold_nano_usd, alert.webhook_url = threshold_nano_usd, webhook_url
    await session.flush()
    return alert


async def sweep(sessions: Sessions, *, clock: Clock = utc_now_us) -> int:
    """Tell whoever has fallen below, and note who is above again; returns how many were told."""
    async with read_only(sessions) as session:
        changed = await _changed(session)
    told = 0
    for organization_id in changed:
        async with sessions.begin() as session:
            told += await _tell(session, organization_id, clock=clock)
    return told


async def deliver(
    sessions: Sessions,
    payload: dict[str, Any],
    *,
    peppers: Mapping[int, SecretStr],
    is_private_allowed: bool = False,
    clock: Clock = utc_now_us,
) -> None:
    """The outbox's handler: post the signed notice. Raises WebhookRefused, httpx.HTTPError."""
    organization_id = payload["organization_id"]
    async with read_only(sessions) as session:
        alert = await find(session, organization_id)
        available = (await ledger.balance(session, organization_id)).available
    if alert is None or alert.webhook_url is None:
        return
    notice = {
        "id": payload["id"],
        "type": "balance.low",
        "organization": organization_id,
        "available": format_usd(available),
        "threshold": format_usd(alert.threshold_nano_usd),
    }
    body = json.dumps(notice).encode()
    seconds = clock() // MICROSECONDS_PER_SECOND
    signature = sign(body, seconds, secret_of(organization_id, peppers))
    await _post(alert.webhook_url, body, signature, is_private_allowed=is_private_allowed)


def secret_of(organization_id: str, peppers: Mapping[int, SecretStr]) -> str:
    """What the organization verifies with. Derived, so that no table holds it."""
    pepper = peppers[max(peppers)].get_secret_value().encode()
    mac = hmac.new(pepper, f"webhook:{organization_id}".encode(), hashlib.sha256).digest()
    return "whsec_" + base64.urlsafe_b64encode(mac).decode().rstrip("=")


def sign(body: bytes, seconds: int, secret: str) -> str:
    """The value of the signature's header."""
    signed = str(seconds).encode() + b"." + body
    return f"t={seconds},v1={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


def require_plain_url(url: str) -> None:
    """Raise WebhookRefused unless it is `http(s)://host[:port]/path` without credentials."""
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username
        is_plain = is_plain and (parts.port is None or parts.port > 0)
    except ValueError:
        is_plain = False
    if not is_plain or len(url) > MAX_URL_LENGTH or not url.isascii() or not url.isprintable():
        raise WebhookRefused("Give an address such as https://example.com/hook.")


async def _changed(session: AsyncSession) -> list[str]:
    available = Balance.posted_nano_usd - Balance.held_nano_usd
    threshold = func.coalesce(BalanceAlert.threshold_nano_usd, DEFAULT_THRESHOLD_NANO_USD)
    is_low = func.coalesce(BalanceAlert.is_low, False)
    # Who never had any credit is not told that it is gone.
    has_had_credit = exists().where(CreditLot.organization_id == Balance.organization_id)
    found = await session.scalars(
        select(Balance.organization_id)
        .outerjoin(BalanceAlert, BalanceAlert.organization_id == Balance.organization_id)
        .where(
            or_(
                (available < threshold) & ~is_low & has_had_credit,
                (available >= threshold) & is_low,
            )
        )
        .order_by(Balance.organization_id)
        .limit(MAX_PER_RUN)
    )
    return list(found)


async def _tell(session: AsyncSession, organization_id: str, *, clock: Clock) -> bool:
    """Promise mail and webhook if it is low now and was not told; False otherwise."""
    alert = await _ensure(session, organization_id)
    available = (await ledger.balance(session, organization_id)).available
    was_low, alert.is_low = alert.is_low, available < alert.threshold_nano_usd
    if was_low or not alert.is_low:
        return False
    alert.times_told += 1
    about = f"{organization_id}:{alert.times_told}"
    await payment_mail.promise(session, "low_balance", organization_id, about=about, clock=clock)
    if alert.webhook_url is not None:
        await outbox.promise(
            session,
            topic=TOPIC,
            key=f"{TOPIC}:{about}",
            payload={"organization_id": organization_id, "id": about},
            clock=clock,
        )
    return True


async def _ensure(session: AsyncSession, organization_id: str) -> BalanceAlert:
    values = {
        "organization_id": organization_id,
        "threshold_nano_usd": DEFAULT_THRESHOLD_NANO_USD,
        "webhook_url": None,
        "is_low": False,
        "times_told": 0,
    }
    await insert_or_ignore(session, BalanceAlert, values)
    return await session.get_one(BalanceAlert, organization_id, with_for_update=True)


async def _post(url: str, body: bytes, signature: str, *, is_private_allowed: bool) -> None:
    """Post to the address that was checked: connecting by name again could lead elsewhere."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = await _resolve(parts.hostname, port, is_private_allowed=is_private_allowed)
    host = f"[{address}]" if ":" in address else address
    headers = {
        "host": parts.netloc,
        "content-type": "application/json",
        "ncompass-signature": signature,
    }
    async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as web:
        response = await web.post(
            parts._replace(netloc=f"{host}:{port}", fragment="").geturl(),
            content=body,
            headers=headers,
            extensions={"sni_hostname": parts.hostname},
        )
    if not response.is_success:
        raise WebhookRefused("The customer's server did not take it.", status=response.status_code)


async def _resolve(host: str, port: int, *, is_private_allowed: bool) -> str:
    """One address of the host; raises WebhookRefused when any of them is not public."""
    try:
        found = await anyio.to_thread.run_sync(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        raise WebhookRefused("There is no such host.") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not is_private_allowed and not all(ipaddress.ip_address(a).is_global for a in addresses):
        raise WebhookRefused("A webhook goes to a public address.")
    return addresses[0]
