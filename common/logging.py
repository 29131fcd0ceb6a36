"""Structured logs that never carry a secret.

Keys of this platform, bearer tokens and the values of secret-looking fields are replaced before a
line is written, whichever library logged it. Prompts and answers are never passed to a logger.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from common.settings import CommonSettings

SECRET_TEXT = re.compile(
    r"sk_ncompass_[A-Za-z0-9_]+"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^/@\s:]*:[^/@\s]+(?=@)"
)
"""A platform key, a bearer token, or `user:password` inside a URL."""

SECRET_FIELDS = frozenset(
    {"authorization", "cookie", "password", "api_key", "plaintext", "token", "secret", "pepper"}
)

REDACTED = "[redacted]"


def redact(text: str) -> str:
    """`text` with every recognisable secret replaced."""
    return SECRET_TEXT.sub(REDACTED, text)


def _redact_event(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if name.lower() in SECRET_FIELDS:
            event[name] = REDACTED
        elif isinstance(value, str):
            event[name] = redact(value)
    return event


def configure(settings: CommonSettings, *, process: str) -> None:
    """Send this process's logs, those of libraries included, to standard error.

    `process` names the part (`api`, `worker`, `celery`) in every line.
    """
    structlog.contextvars.bind_contextvars(process=process)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
