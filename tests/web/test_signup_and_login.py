"""From stranger to customer and back."""

import pytest
from sqlalchemy import func, select

from accounts import api_keys
from accounts.errors import TooManyAttempts
from accounts.models import Session, User
from tests.web.site import ACCOUNTS, KEY, PASSWORD, Site, Tab, make_services, make_site
from web.redirects import safe_next


async def test_sign_up_shows_a_working_key_once_and_a_hundred_dollars(site: Site, tab: Tab) -> None:
    key = await tab.sign_up("ada@example.com")

    assert tab.page.count(key) == 2, "once to keep, once in the curl line"
    assert "$100.00" in tab.page
    assert "http://ncompass.test/v1/chat/completions" in tab.page
    async with site.services.sessions() as session:
        principal = await api_keys.authenticate(session, key, site.services.key_ring)
    assert principal.scopes == {"inference", "account"}

    again = await tab.open("/welcome")
    assert KEY.search(again.text) is None
    assert "$NCOMPASS_API_KEY" in again.text


async def test_the_key_waits_in_redis_only_masked_and_only_for_its_own_browser(
    site: Site, tab: Tab
) -> None:
    await tab.open("/signup")
    response = await tab.send("/signup", email="ada@example.com", password=PASSWORD)
    assert response.headers["location"] == "/welcome"
    names = await site.services.redis.keys("nc:web:*")
    assert len(names) == 1
    stored = await site.services.redis.get(names[0])
    assert isinstance(stored, bytes)
    assert b"sk_ncompass" not in stored
    assert 0 < await site.services.redis.ttl(names[0]) <= 60

    thief = site.tab()
    await thief.sign_up("eve@example.com")
    thief.client.cookies.set("ncompass_key", tab.client.cookies["ncompass_key"])
    assert KEY.search((await thief.open("/welcome")).text) is None
    assert KEY.search((await tab.open("/welcome")).text) is not None


@pytest.mark.parametrize(
    ("email", "password", "field", "sentence"),
    [
        ("nonsense", PASSWORD, "email", "not a valid e-mail"),
        ("ada@mailinator.com", PASSWORD, "email", "permanent"),
        ("ada@example.com", "short", "password", "at least 10 characters"),
        ("", "", "email", "not a valid e-mail"),
    ],
)
async def test_a_refused_sign_up_says_why_beside_the_field(
    tab: Tab, email: str, password: str, field: str, sentence: str
) -> None:
    await tab.open("/signup")
    response = await tab.send("/signup", email=email, password=password)
    assert response.status_code == 422
    assert f'id="error-{field}"' in response.text
    assert sentence in response.text
    assert f'value="{email}"' in response.text
    assert not password or f'"{password}"' not in response.text


async def test_one_inbox_gets_one_account_whatever_the_spelling(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada.lovelace@gmail.com")
    other = site.tab()
    await other.open("/signup")
    response = await other.send("/signup", email="AdaLovelace+1@gmail.com", password=PASSWORD)
    assert response.status_code == 422
    assert "account for this e-mail" in response.text
    async with site.services.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(User)) == 1


async def test_log_in_and_out(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    first_session = tab.client.cookies["ncompass_session"]
    await tab.submit("/logout")
    assert "ncompass_session" not in tab.client.cookies
    async with site.services.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(Session)) == 0

    stale = site.tab()
    stale.client.cookies.set("ncompass_session", first_session)
    assert (await stale.open("/usage")).url.path == "/login"

    await tab.open("/keys")
    assert 'value="/keys"' in tab.page, "the form remembers where we were going"
    response = await tab.submit("/login", email="ada@example.com", password=PASSWORD, next="/keys")
    assert response.url.path == "/keys"
    assert tab.client.cookies["ncompass_session"] != first_session


async def test_wrong_password_and_unknown_address_get_the_same_answer(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    pages = []
    for email in ("ada@example.com", "bob@example.com"):
        stranger = site.tab()
        await stranger.open("/login")
        response = await stranger.send("/login", email=email, password="not the password")
        assert response.status_code == 401
        assert "not the password" not in response.text
        token = stranger.page.split('name="csrf_token" value="')[1].split('"')[0]
        pages.append(response.text.replace(email, "…").replace(token, "…"))
    assert pages[0] == pages[1]


async def test_logging_in_ends_the_session_that_this_browser_had(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    old = tab.client.cookies["ncompass_session"]
    await tab.send("/login", email="ada@example.com", password=PASSWORD)
    assert tab.client.cookies["ncompass_session"] != old
    async with site.services.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(Session)) == 1


async def test_guessing_passwords_meets_a_page_that_says_when_to_return(site: Site) -> None:
    settings = ACCOUNTS.model_copy(update={"login_attempts_per_email_and_network": 2})
    services = make_services(
        site.services.sessions, site.services.redis, accounts_settings=settings
    )
    throttled = make_site(services)
    tab = throttled.tab()
    await tab.open("/login")
    for _ in range(2):
        assert (await tab.send("/login", email="a@example.com", password="x")).status_code == 401
        await tab.open("/login")
    response = await tab.send("/login", email="a@example.com", password="x")
    assert response.status_code == 429
    assert 0 < int(response.headers["retry-after"]) <= settings.login_window_s
    assert "Too many attempts" in response.text
    with pytest.raises(TooManyAttempts):
        await services.throttle.login(address="127.0.0.1", email="a@example.com")
    await tab.client.aclose()
    services.password_hasher.close()


async def test_someone_signed_in_is_sent_on_from_the_forms(tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    assert (await tab.open("/login?next=/models")).url.path == "/models"
    assert (await tab.open("/signup")).url.path == "/usage"


async def test_cookies_are_locked_down(site: Site) -> None:
    web_settings = site.services.web_settings.model_copy(update={"is_tls": True})
    services = make_services(site.services.sessions, site.services.redis, web_settings=web_settings)
    secure = make_site(services).tab()
    secure.client.base_url = "https://ncompass.test"
    response = await secure.open("/signup")
    assert response.headers["strict-transport-security"]
    visit = response.headers["set-cookie"]
    token = secure.page.split('name="csrf_token" value="')[1].split('"')[0]
    response = await secure.client.post(
        "/signup",
        data={"csrf_token": token, "email": "ada@example.com", "password": PASSWORD},
        headers={"origin": "https://ncompass.test"},
    )
    assert response.status_code == 303
    cookies = [visit, *response.headers.get_list("set-cookie")]
    assert {cookie.split("=")[0] for cookie in cookies} == {
        "__Host-ncompass_visit",
        "__Host-ncompass_session",
        "__Host-ncompass_key",
    }
    for cookie in cookies:
        attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert {"httponly", "secure", "samesite=lax", "path=/"} <= attributes
    await secure.client.aclose()
    services.password_hasher.close()


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "usage",
        "//evil.example",
        "///evil.example",
        "/\\evil.example",
        "/\t/evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/a\nSet-Cookie: x=y",
        "/" + "a" * 600,
        "/é",
    ],
)
def test_next_never_leads_to_another_site(value: str | None) -> None:
    assert safe_next(value) == "/usage"


@pytest.mark.parametrize("value", ["/keys", "/usage?by=tokens", "/models/a/b", "/"])
def test_next_leads_to_our_own_pages(value: str) -> None:
    assert safe_next(value) == value
