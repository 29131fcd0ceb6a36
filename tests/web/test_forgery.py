"""No form is accepted that this browser did not get from us."""

import pytest
from sqlalchemy import func, select

from accounts.models import ApiKey, Session
from tests.web.site import ORIGIN, PASSWORD, TOKEN, Site, Tab, routes_of

UNSAFE = {"POST", "PUT", "PATCH", "DELETE"}


def unsafe_paths(site: Site) -> list[str]:
    return [
        route.path.replace("{key_id}", "key_any")
        for route in routes_of(site.app)
        if route.methods & UNSAFE
    ]


async def test_every_unsafe_route_refuses_a_form_without_the_token(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    paths = unsafe_paths(site)
    assert {"/signup", "/login", "/logout", "/keys", "/models"} <= set(paths)
    for path in paths:
        for fields in (
            {"a": "b"},
            {"csrf_token": ""},
            {"csrf_token": "0" * 64},
            {"csrf_token": "é"},
        ):
            response = await tab.client.post(path, data=fields, headers={"origin": ORIGIN})
            assert response.status_code == 403, path
            response = await site.tab().client.post(path, data=fields)
            assert response.status_code == 403, path
    async with site.services.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(ApiKey)) == 1
        assert await session.scalar(select(func.count()).select_from(Session)) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https://ncompass.test"},
        {"origin": "http://ncompass.test:8080"},
        {"origin": "http://sub.ncompass.test"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": ORIGIN, "sec-fetch-site": "cross-site"},
    ],
)
async def test_a_foreign_sender_is_refused_even_with_the_right_token(
    site: Site, tab: Tab, headers: dict[str, str]
) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/keys")
    token = TOKEN.search(tab.page)
    assert token is not None
    for path in unsafe_paths(site):
        response = await tab.client.post(path, data={"csrf_token": token[1]}, headers=headers)
        assert response.status_code == 403, path


async def test_another_sessions_token_is_refused(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/keys")
    other = site.tab()
    await other.sign_up("bob@example.com")
    other.page = tab.page
    assert (await other.send("/keys", name="stolen")).status_code == 403


async def test_a_visitors_token_belongs_to_that_visitors_browser(site: Site, tab: Tab) -> None:
    await tab.open("/login")
    other = site.tab()
    await other.open("/login")
    other.page = tab.page
    response = await other.send("/login", email="ada@example.com", password=PASSWORD)
    assert response.status_code == 403


async def test_a_visitors_token_is_worthless_once_signed_in(site: Site, tab: Tab) -> None:
    await tab.open("/signup")
    before = tab.page
    await tab.sign_up("ada@example.com")
    tab.page = before
    assert (await tab.send("/keys", name="stale")).status_code == 403


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b'{"name": "x"}', "application/json", 400),
        (b"name=x", "text/plain", 400),
        (b"name=%FF%FE", "application/x-www-form-urlencoded", 400),
        (b"name=a%00b", "application/x-www-form-urlencoded", 400),
        (b"name=\xff", "application/x-www-form-urlencoded", 400),
        (b"a=1&" * 40, "application/x-www-form-urlencoded", 400),
        (b"name=" + b"x" * 70_000, "application/x-www-form-urlencoded", 413),
    ],
)
async def test_what_no_browser_sends_is_refused(
    tab: Tab, content: bytes, media_type: str, status: int
) -> None:
    await tab.sign_up("ada@example.com")
    response = await tab.client.post(
        "/keys", content=content, headers={"origin": ORIGIN, "content-type": media_type}
    )
    assert response.status_code == status
