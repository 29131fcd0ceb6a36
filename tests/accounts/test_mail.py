"""Mails go to a real mail server: encrypted, to nobody else, and again when it was away."""

import smtplib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from email import message_from_bytes, policy
from email.message import EmailMessage
from functools import partial

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from pydantic import SecretStr

from accounts import verification
from accounts.mail import Mailer
from accounts.settings import AccountsSettings
from billing import signup
from billing.outbox_relay import deliver_due
from billing.settings import BillingSettings
from common.clock import utc_now_us
from tests.billing.conftest import ACCOUNTS, Books, books

__all__ = ["books"]

# the server's own warning, where it takes a password without STARTTLS: some do
pytestmark = pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")

PASSWORD = "the mail server's password"


@dataclass
class Inbox:
    """What a mail server has heard."""

    mails: list[EmailMessage] = field(default_factory=list)
    recipients: list[list[str]] = field(default_factory=list)
    passwords: list[bytes] = field(default_factory=list)

    async def handle_DATA(self, _: SMTP, __: Session, envelope: Envelope) -> str:
        """A mail has come."""
        content = envelope.original_content
        assert content is not None
        mail = message_from_bytes(content, policy=policy.default)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        self.recipients.append(envelope.rcpt_tos)
        return "250 OK"

    def log_in(
        self, _: SMTP, __: Session, ___: Envelope, ____: str, who: LoginPassword
    ) -> AuthResult:
        """Only one knows the password."""
        self.passwords.append(who.password)
        is_known = who == LoginPassword(b"ncompass", PASSWORD.encode())
        return AuthResult(success=is_known, handled=is_known)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusting(
    authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our side takes what this authority has signed, as it takes what the system trusts."""
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def mail_server(
    authority: trustme.CA, security: str, name: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[Inbox, AccountsSettings]]:
    """A mail server that takes mail only from who has logged in, and the settings that lead to it.

    Unless `security` is `none` it takes nothing in clear text.
    """
    inbox = Inbox()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    port = port or free_port()
    server = Controller(
        inbox,
        hostname="127.0.0.1",
        port=port,
        ssl_context=context if security == "tls" else None,
        tls_context=context if security == "starttls" else None,
        require_starttls=security == "starttls",
        authenticator=inbox.log_in,
        auth_required=True,
        auth_require_tls=security == "starttls",
    )
    server.start()
    try:
        yield inbox, settings_for(security, port)
    finally:
        server.stop()


def settings_for(security: str, port: int) -> AccountsSettings:
    return ACCOUNTS.model_copy(
        update={
            "is_email_verification_on": True,
            "mail_backend": "smtp",
            "mail_from": "nCompass <no-reply@example.com>",
            "smtp_port": port,
            "smtp_security": security,
            "smtp_username": "ncompass",
            "smtp_password": SecretStr(PASSWORD),
            "smtp_timeout_s": 5.0,
        }
    )


async def send(settings: AccountsSettings) -> None:
    await Mailer(settings).send(
        to="you@example.com",
        subject="Reset your password — now",
        body="Grüße,\n\n.\nhttps://example.com/reset?token=abc\n",
    )


@pytest.mark.parametrize("security", ["starttls", "tls"])
@pytest.mark.usefixtures("trusting")
async def test_a_mail_arrives_encrypted_and_whole(authority: trustme.CA, security: str) -> None:
    with mail_server(authority, security) as (inbox, settings):
        await send(settings)
    (mail,) = inbox.mails
    assert mail["Subject"] == "Reset your password — now"
    assert mail["From"] == "nCompass <no-reply@example.com>"
    assert mail.get_content().splitlines() == [
        "Grüße,", "", ".", "https://example.com/reset?token=abc",
    ]  # fmt: skip
    assert inbox.recipients == [["you@example.com"]]


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_server_that_nobody_vouches_for_never_hears_the_password(
    authority: trustme.CA, security: str
) -> None:
    with mail_server(authority, security) as (inbox, settings):
        with pytest.raises(ssl.SSLCertVerificationError):
            await send(settings)
        assert (inbox.passwords, inbox.mails) == ([], [])


@pytest.mark.parametrize("security", ["starttls", "tls"])
@pytest.mark.usefixtures("trusting")
async def test_a_certificate_for_another_host_is_refused(
    authority: trustme.CA, security: str
) -> None:
    with mail_server(authority, security, name="mail.example.com") as (inbox, settings):
        with pytest.raises(ssl.SSLCertVerificationError):
            await send(settings)
        assert inbox.passwords == []


@pytest.mark.usefixtures("trusting")
async def test_a_server_that_cannot_encrypt_never_hears_the_password(
    authority: trustme.CA,
) -> None:
    with mail_server(authority, "none") as (inbox, settings):
        strict = settings.model_copy(update={"smtp_security": "starttls"})
        with pytest.raises(smtplib.SMTPNotSupportedError):
            await send(strict)
        assert (inbox.passwords, inbox.mails) == ([], [])


@pytest.mark.usefixtures("trusting")
async def test_a_wrong_password_is_an_error_and_sends_nothing(authority: trustme.CA) -> None:
    with mail_server(authority, "starttls") as (inbox, settings):
        wrong = settings.model_copy(update={"smtp_password": SecretStr("wrong")})
        with pytest.raises(smtplib.SMTPAuthenticationError):
            await send(wrong)
        assert inbox.mails == []


@pytest.mark.usefixtures("trusting")
async def test_a_promised_mail_is_sent_once_the_server_is_back(
    authority: trustme.CA, books: Books
) -> None:
    port = free_port()
    settings = settings_for("starttls", port)
    async with books.sessions.begin() as session:
        await signup.sign_up(
            session,
            email="new@example.com",
            password="a long enough password",
            hasher=books.hasher,
            key_ring=books.key_ring,
            accounts_settings=settings,
            billing_settings=BillingSettings(),
        )
    handlers = {
        verification.TOPIC: partial(
            verification.deliver, mailer=Mailer(settings), settings=settings
        )
    }
    assert await deliver_due(books.sessions, handlers) == 0
    a_day_us = int(timedelta(days=1) / timedelta(microseconds=1))
    with mail_server(authority, "starttls", port=port) as (inbox, _):
        for _ in range(2):
            await deliver_due(books.sessions, handlers, clock=lambda: utc_now_us() + a_day_us)
    (mail,) = inbox.mails
    assert "/verify?token=" in mail.get_content()
    assert inbox.recipients == [["new@example.com"]]
