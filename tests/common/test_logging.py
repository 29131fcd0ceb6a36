import json
import logging

import pytest
import structlog

from common import logging as platform_logging
from common.settings import CommonSettings


@pytest.mark.parametrize(
    "text",
    [
        "key sk_ncompass_abcdefghijkl_0123456789abcdef0123456789abcdef123456 refused",
        "Authorization: Bearer abcdef0123456789",
        "redis://:hunter2hunter2@127.0.0.1:6379/0",
    ],
)
def test_a_secret_inside_a_sentence_is_replaced(text: str) -> None:
    redacted = platform_logging.redact(text)
    assert platform_logging.REDACTED in redacted
    for secret in ("0123456789abcdef", "abcdef0123456789", "hunter2"):
        assert secret not in redacted


def test_secrets_of_libraries_and_of_fields_are_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        platform_logging.configure(CommonSettings(log_format="json"), process="test")
        structlog.get_logger().warning("signed up", password="correct horse", email="a@b.c")
        logging.getLogger("library").warning("called with %s", "sk_ncompass_abc_def123456")
        out = capsys.readouterr().err
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["password"] == platform_logging.REDACTED
    assert first["email"] == "a@b.c"
    assert first["process"] == "test"
    assert "sk_ncompass" not in second["event"]
