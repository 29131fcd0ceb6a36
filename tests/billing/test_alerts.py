"""Warnings of low credit: once each time, by mail and by a signed webhook."""

import hashlib
import hmac
import io
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from accounts.mail import Mailer
from billing import alerts, ledger, payment_mail
from billing.errors import InvalidAmount, WebhookRefused
from billing.outbox_relay import deliver_due
from common.clock import utc_now_us
from tests.billing.conftest import ACCOUNTS, Books
from tests.billing.payments import DOLLAR, database_url

__all__ = ["database_url"]


class Receiver(BaseHTTPRequestHandler):
    received: list[tuple[dict[str, str], bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((dict(self.headers.items()), body))
        self.send_response(302 if self.path == "/moved" else 204)
        self.send_header("location", "http://127.0.0.1:1/")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]]]]:
    Receiver.received = []
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Receiver.received
    server.shutdown()
    thread.join()
    server.server_close()


async def adjust(books: Books, amount: int, key: str) -> None:
    async with books.sessions.begin() as session:
        await ledger.adjust_credit(
            session, books.organization_id, amount, reason="test", actor="t", key=key
        )


async def relay(books: Books, *, is_private_allowed: bool = True) -> str:
    """Deliver what is promised; returns the mails."""
    console = io.StringIO()
    mailer = Mailer(ACCOUNTS, console=console)
    handlers = {
        payment_mail.TOPIC: partial(payment_mail.deliver, mailer=mailer, settings=ACCOUNTS),
        alerts.TOPIC: partial(
            alerts.deliver,
            peppers=ACCOUNTS.api_key_peppers,
            is_private_allowed=is_private_allowed,
        ),
    }
    await deliver_due(books.sessions, handlers)
    return console.getvalue()


async def test_each_fall_below_the_threshold_is_told_once(books: Books) -> None:
    assert await alerts.sweep(books.sessions) == 1, "$1 is below the default of $5"
    assert await alerts.sweep(books.sessions) == 0
    mail = await relay(books)
    assert "mail to ada@example.com" in mail
    assert "$1.00 left" in mail
    await adjust(books, 10 * DOLLAR, "up")
    assert await alerts.sweep(books.sessions) == 0
    await adjust(books, -7 * DOLLAR, "down")
    assert await alerts.sweep(books.sessions) == 1
    assert "$4.00 left" in await relay(books)


async def test_who_never_had_credit_is_not_told_that_it_is_gone(books: Books) -> None:
    await books.sign_up("poor@example.com")
    assert await alerts.sweep(books.sessions) == 1


async def test_the_webhook_is_signed_and_says_what_the_ledger_says(
    books: Books, receiver: tuple[str, list[tuple[dict[str, str], bytes]]]
) -> None:
    url, received = receiver
    async with books.sessions.begin() as session:
        await alerts.configure(
            session,
            books.organization_id,
            threshold_nano_usd=2 * DOLLAR,
            webhook_url=f"{url}/hook?a=b",
        )
    await alerts.sweep(books.sessions)
    await relay(books)
    ((headers, body),) = received
    notice = json.loads(body)
    assert notice["type"] == "balance.low"
    assert (notice["available"], notice["threshold"]) == ("1.000000000", "2.000000000")
    lowered = {name.lower(): value for name, value in headers.items()}
    seconds, signature = (part.split("=")[1] for part in lowered["ncompass-signature"].split(","))
    assert abs(int(seconds) - utc_now_us() // 1_000_000) < 60
    secret = alerts.secret_of(books.organization_id, ACCOUNTS.api_key_peppers).encode()
    expected = hmac.new(secret, seconds.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert signature == expected
    assert url.removeprefix("http://") == lowered["host"]


async def test_a_webhook_leads_to_no_private_network_and_follows_no_redirect(
    books: Books, receiver: tuple[str, list[tuple[dict[str, str], bytes]]]
) -> None:
    url, received = receiver
    async with books.sessions.begin() as session:
        await alerts.configure(
            session, books.organization_id, threshold_nano_usd=2 * DOLLAR, webhook_url=url
        )
    payload = {"organization_id": books.organization_id, "id": "1"}
    send = partial(alerts.deliver, books.sessions, payload, peppers=ACCOUNTS.api_key_peppers)
    with pytest.raises(WebhookRefused):
        await send()
    assert received == []
    async with books.sessions.begin() as session:
        await alerts.configure(
            session,
            books.organization_id,
            threshold_nano_usd=2 * DOLLAR,
            webhook_url=f"{url}/moved",
        )
    with pytest.raises(WebhookRefused):
        await send(is_private_allowed=True)
    assert len(received) == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com",
        "file:///etc/passwd",
        "https://",
        "https://user:secret@example.com/",
        "https://example.com:99999/",
        "https://example.com/\r\nHost: evil",
        "javascript:alert(1)",
        "https://example.com/" + "a" * 600,
    ],
)
async def test_only_plain_addresses_are_taken(books: Books, url: str) -> None:
    async with books.sessions.begin() as session:
        with pytest.raises(WebhookRefused):
            await alerts.configure(
                session, books.organization_id, threshold_nano_usd=0, webhook_url=url
            )
        with pytest.raises(InvalidAmount):
            await alerts.configure(
                session, books.organization_id, threshold_nano_usd=-1, webhook_url=None
            )
