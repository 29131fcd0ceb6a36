"""What would fail late is refused early, in one line that says what to do."""

import errno
import shutil
import socket
from pathlib import Path

from accounts.settings import AccountsSettings
from infra.errors import DiskFull, PortBusy, PublicBindRefused, WrongSettings
from infra.local.wiring import database_url, is_loopback
from infra.settings import InfraSettings

REQUIRED_BYTES = 200_000_000
"""Logs, ledger and compiled kernels; the model's conversion asks for its own room."""


def check_settings(settings: InfraSettings, accounts: AccountsSettings) -> None:
    """Refuse settings that contradict each other. Raises WrongSettings, PublicBindRefused."""
    if not is_loopback(settings.host) and not accounts.is_email_verification_on:
        raise PublicBindRefused(
            f"{settings.host} can be reached from other machines, and e-mail verification is off:"
            " anybody could take the free credit again and again; listen on 127.0.0.1, or set"
            " NCOMPASS_ACCOUNTS_IS_EMAIL_VERIFICATION_ON=true"
        )
    if settings.api_processes > 1 and database_url(settings).startswith("sqlite"):
        raise WrongSettings(
            f"NCOMPASS_API_PROCESSES={settings.api_processes} needs PostgreSQL (SQLite has one"
            " writer): set NCOMPASS_DATABASE_URL=postgresql+psycopg://…"
        )


def check_disk(var: Path) -> None:
    """Raises DiskFull where not even the logs would fit."""
    free = shutil.disk_usage(var).free
    if free < REQUIRED_BYTES:
        raise DiskFull(
            f"disk full: {var} needs {REQUIRED_BYTES // 10**6} MB, {free // 10**6} MB are free;"
            " make room, then run again",
            free_bytes=free,
        )


def listen(settings: InfraSettings) -> socket.socket:
    """The socket that the API serves, bound now so that a busy port is known before anything runs.

    The supervisor keeps it: while an API process is started again, callers wait instead of being
    refused. Raises PortBusy.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # NOTE: accepted connections inherit it. Without it the last segment of every answer waits 40 ms
    # for an ACK, wherever the server does not set it itself (uvicorn's --fd does not).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(settings.backlog)
    except OSError as fault:
        listener.close()
        if fault.errno == errno.EADDRINUSE:
            raise PortBusy(
                f"port {settings.port} is in use by another program; choose another one:"
                f" make run PORT={settings.port + 1}",
                port=settings.port,
            ) from fault
        raise PortBusy(
            f"cannot listen on {settings.host}:{settings.port}: {fault.strerror};"
            " choose another port: make run PORT=8001",
            port=settings.port,
        ) from fault
    return listener


def free_port() -> int:
    """A port of the loopback interface that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
