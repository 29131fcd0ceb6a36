"""Passwords, keys and tokens go through the pages and into no log."""

import logging

import httpx
import pytest

from common.logging import configure
from common.settings import CommonSettings
from tests.web.site import KEY, Site, Tab
from web.forms import PostedForm
from web.one_time import KeyHandover

CANARY = "canary-password-7f3a"


async def test_no_secret_is_logged_whatever_goes_wrong(
    site: Site,
    tab: Tab,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers, level = list(logging.root.handlers), logging.root.level
    configure(CommonSettings(log_level="DEBUG"), process="web")
    try:
        key = await tab.sign_up("ada@example.com", CANARY)
        session_token = tab.client.cookies["ncompass_session"]
        await tab.open("/keys")
        second = KEY.search((await tab.submit("/keys", name="laptop")).text)
        await tab.open("/keys")
        await tab.submit("/logout")
        await tab.open("/login")
        await tab.send("/login", email="ada@example.com", password=CANARY + "-wrong")

        async def broken(*_: object, **__: object) -> None:
            raise RuntimeError("no luck")

        monkeypatch.setattr("web.routes.login.users.authenticate", broken)
        await tab.open("/login")
        assert (
            await tab.send("/login", email="ada@example.com", password=CANARY)
        ).status_code == 500
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    captured = capsys.readouterr()
    logged = captured.out + captured.err
    assert "page_failed" in logged, "the canary would have nowhere to sing"
    assert second is not None
    for secret in (CANARY, key, second[0], session_token):
        assert secret not in logged


def test_a_form_does_not_print_what_it_holds() -> None:
    assert CANARY not in repr(PostedForm({"password": CANARY}))


async def test_a_handed_over_secret_is_taken_once_by_who_has_both_halves(site: Site) -> None:
    handover = KeyHandover(site.services.redis, ttl_s=60)
    pad = await handover.put("session", "the key")
    assert await handover.take("another session", pad) is None
    assert await handover.take("session", pad) == "the key"
    assert await handover.take("session", pad) is None


@pytest.mark.parametrize("pad", ["", "!", "AAAA", "é", "x" * 5_000])
async def test_a_wrong_pad_gives_nothing(site: Site, pad: str) -> None:
    handover = KeyHandover(site.services.redis, ttl_s=60)
    await handover.put("session", "the key")
    assert await handover.take("session", pad) is None


async def test_a_new_keys_page_is_never_stored(tab: Tab) -> None:
    await tab.open("/signup")
    await tab.send("/signup", email="ada@example.com", password=CANARY)
    response: httpx.Response = await tab.open("/welcome")
    assert KEY.search(response.text) is not None
    assert response.headers["cache-control"] == "no-store"
