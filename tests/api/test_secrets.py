"""Prompts, answers, keys and passwords appear in no log line, whatever happens."""

import io
import logging

import pytest
import structlog

from common.logging import configure
from common.settings import CommonSettings
from tests.api.conftest import MODEL, Platform

CANARY = "canary-prompt-91c4"
PASSWORD = "canary-password-5e0b"


async def test_no_log_line_holds_a_prompt_a_key_or_a_password(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    handlers = logging.getLogger().handlers[:]
    level = logging.getLogger().level
    configure(CommonSettings(log_level="DEBUG", log_format="json"), process="test")
    for handler in logging.getLogger().handlers:
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(written)
    try:
        await _everything_that_can_happen(platform, monkeypatch)
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
        structlog.reset_defaults()
    lines = written.getvalue()
    assert "request_failed" in lines, "the log was really captured"
    for secret in (CANARY, PASSWORD, platform.customer.key, "sk_ncompass_", "the answer is secret"):
        assert secret not in lines, [line for line in lines.splitlines() if secret in line][:3]


async def _everything_that_can_happen(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    platform.say("the answer is secret")
    assert (await platform.chat(CANARY)).status_code == 200
    assert (await platform.chat(CANARY, stream=True)).status_code == 200
    assert (await platform.chat(CANARY, temperature=CANARY)).status_code == 400
    assert (await platform.chat(CANARY * 10_000)).status_code == 400
    platform.say("the answer is secret", end="error")
    assert (await platform.chat(CANARY)).status_code == 503
    await platform.chat(CANARY, stream=True)
    sign_up = {"email": "eve@example.com", "password": PASSWORD}
    answer = await platform.client.post("/v1/signup", json=sign_up)
    assert answer.status_code == 201
    assert (await platform.client.post("/v1/signup", json=sign_up)).status_code == 400
    await platform.post("/v1/keys", {"name": "new"})
    await platform.client.get("/v1/credits", headers={"authorization": "Bearer sk_ncompass_wrong"})

    async def explode(self: object, messages: object) -> None:
        raise RuntimeError(f"a bug that repeats its input: {messages} {platform.customer.key}")

    from api.tokenizers import LoadedTokenizer

    monkeypatch.setattr(LoadedTokenizer, "encode_chat", explode)
    assert (await platform.chat(CANARY)).status_code == 500
    body = {"model": MODEL, "prompt": CANARY}
    platform.say("fine")
    assert (await platform.post("/v1/completions", body)).status_code == 200
