"""Sending mail: by SMTP, or to the console of whoever runs the platform on a machine of their own."""

import asyncio
import smtplib
import ssl
import sys
from email.message import EmailMessage
from typing import TextIO

from accounts.settings import AccountsSettings


class Mailer:
    """Sends one mail at a time; raises OSError or smtplib.SMTPException when it cannot."""

    def __init__(self, settings: AccountsSettings, *, console: TextIO | None = None) -> None:
        self._settings = settings
        self._console = console or sys.stderr

    async def send(self, *, to: str, subject: str, body: str) -> None:
        """Send a plain-text mail, in a thread: SMTP waits for the other side many times."""
        mail = EmailMessage()  # its policy refuses line breaks in headers
        mail["From"], mail["To"], mail["Subject"] = self._settings.mail_from, to, subject
        mail.set_content(body)
        if self._settings.mail_backend == "console":
            # A link in it is for whoever reads the console; it goes through no logger.
            self._console.write(f"--- mail to {to}: {subject}\n{body}\n---\n")
            self._console.flush()
            return
        await asyncio.to_thread(self._send_by_smtp, mail)

    def _send_by_smtp(self, mail: EmailMessage) -> None:
        settings = self._settings
        with self._connect() as server:
            if settings.smtp_username:
                server.login(settings.smtp_username, settings.smtp_password.get_secret_value())
            server.send_message(mail)

    def _connect(self) -> smtplib.SMTP:
        """A connection whose other end has proved who it is, before it hears any secret."""
        settings = self._settings
        host, port, timeout = settings.smtp_host, settings.smtp_port, settings.smtp_timeout_s
        if settings.smtp_security == "tls":
            context = ssl.create_default_context()
            return smtplib.SMTP_SSL(host, port, timeout=timeout, context=context)
        server = smtplib.SMTP(host, port, timeout=timeout)
        if settings.smtp_security == "starttls":
            # Without a context of ours smtplib would take any certificate.
            try:
                server.starttls(context=ssl.create_default_context())
            except BaseException:
                server.close()
                raise
        return server
