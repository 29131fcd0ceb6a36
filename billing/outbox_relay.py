"""Delivers the outbox: mail today, webhooks to customers later. One handler per topic."""

import asyncio
import smtplib
from email.message import EmailMessage

import structlog

from accounts.settings import AccountsSettings
from common import outbox
from common.db import Sessions

logger = structlog.get_logger(__name__)

MAX_PER_RUN = 50
MAIL = "mail"
"""Topic of a mail; the payload has `to`, `subject` and `body`."""


async def deliver_due(sessions: Sessions, settings: AccountsSettings) -> int:
    """Deliver what is due; returns how many messages were. Each one is its own transaction."""
    delivered = 0
    for _ in range(MAX_PER_RUN):
        async with sessions.begin() as session:
            messages = await outbox.due(session, limit=1)
            if not messages:
                return delivered
            delivered += await _deliver(messages[0], settings)
    return delivered


async def _deliver(message: outbox.OutboxMessage, settings: AccountsSettings) -> bool:
    """Deliver one message and mark it; a failure is noted and tried again later."""
    if message.topic != MAIL:
        outbox.mark_failed(message, f"no handler for topic {message.topic}")
        return False
    try:
        await asyncio.to_thread(_send_mail, message.payload, settings)
    except (OSError, smtplib.SMTPException) as fault:
        outbox.mark_failed(message, f"{type(fault).__name__}")
        logger.warning("mail not sent", message=message.id, reason=type(fault).__name__)
        return False
    outbox.mark_done(message)
    return True


def _send_mail(payload: dict[str, str], settings: AccountsSettings) -> None:
    mail = EmailMessage()
    mail["From"], mail["To"] = settings.mail_from, payload["to"]
    mail["Subject"] = payload["subject"]
    mail.set_content(payload["body"])
    if settings.mail_backend == "console":
        # The body may hold a single-use link, so it is for whoever reads the console, not a log.
        print(f"--- mail to {payload['to']}: {payload['subject']}\n{payload['body']}\n---")  # noqa: T201
        return
    with smtplib.SMTP(
        settings.smtp_host, settings.smtp_port, timeout=settings.smtp_timeout_s
    ) as server:
        if settings.smtp_starttls:
            server.starttls()
        if settings.smtp_username:
            server.login(settings.smtp_username, settings.smtp_password.get_secret_value())
        server.send_message(mail)
