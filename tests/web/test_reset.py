"""A forgotten password, from the log-in page to a new session."""

import io
import re

from accounts import password_reset
from accounts.mail import Mailer
from billing.outbox_relay import deliver_due
from tests.web.site import ACCOUNTS, PASSWORD, Site, Tab, make_services, make_site

NEW = "another long password"


async def link_mailed(site: Site) -> str:
    console = io.StringIO()
    mailer = Mailer(ACCOUNTS, console=console)

    async def mail(sessions: object, payload: dict[str, str]) -> None:
        await password_reset.deliver(
            site.services.sessions, payload, mailer=mailer, settings=ACCOUNTS
        )

    await deliver_due(site.services.sessions, {password_reset.TOPIC: mail})
    (link,) = re.findall(r"http://\S+?(/reset\?token=\S+)", console.getvalue())
    return str(link)


async def test_a_forgotten_password_is_replaced_and_the_thief_is_out(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    thief = tab
    owner = site.tab()
    assert 'href="/forgot"' in (await owner.open("/login")).text
    await owner.open("/forgot")
    sent = await owner.submit("/forgot", email="ada@example.com")
    assert sent.url.path == "/forgot/sent"
    link = await link_mailed(site)

    scanner = site.tab()
    for _ in range(2):
        assert (await scanner.open(link)).status_code == 200, "looking uses nothing up"
    token = link.split("token=")[1]
    await owner.open(link)
    refused = await owner.send("/reset", token=token, password="short")
    assert refused.status_code == 422
    assert "at least 10 characters" in refused.text
    assert (await owner.submit("/reset", token=token, password=NEW)).url.path == "/reset/done"

    assert (await thief.open("/usage")).url.path == "/login"
    await owner.open("/login")
    assert (
        await owner.send("/login", email="ada@example.com", password=PASSWORD)
    ).status_code == 401
    response = await owner.submit("/login", email="ada@example.com", password=NEW)
    assert response.url.path == "/usage"

    again = await scanner.send("/reset", token=token, password=NEW)
    assert again.status_code == 400
    assert "This link does not work" in again.text


async def test_known_and_unknown_addresses_get_the_same_answer(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    answers = []
    for email in ("ada@example.com", "bob@example.com"):
        stranger = site.tab()
        await stranger.open("/forgot")
        response = await stranger.send("/forgot", email=email)
        answers.append((response.status_code, response.headers["location"], response.text))
    assert answers[0] == answers[1]
    await tab.open("/forgot")
    response = await tab.send("/forgot", email="no address")
    assert response.status_code == 422
    assert 'id="error-email"' in response.text


async def test_resets_are_counted_by_inbox_and_by_network(site: Site) -> None:
    strict = ACCOUNTS.model_copy(update={"reset_mails_per_email": 2, "resets_per_network": 2})
    services = make_services(site.services.sessions, site.services.redis, accounts_settings=strict)
    throttled = make_site(services)
    tab = throttled.tab()
    await tab.open("/forgot")
    for _ in range(2):
        assert (await tab.send("/forgot", email="nobody@example.com")).status_code == 303
        await tab.open("/forgot")
    response = await tab.send("/forgot", email="nobody@example.com")
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    await tab.open("/reset?token=guess")
    for status in (400, 400, 429):
        assert (await tab.send("/reset", token="guess", password=NEW)).status_code == status
        await tab.open("/reset?token=guess")
    services.password_hasher.close()


async def test_someone_signed_in_may_change_a_password_too(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/forgot")
    await tab.submit("/forgot", email="ada@example.com")
    link = await link_mailed(site)
    await tab.open(link)
    done = await tab.submit("/reset", token=link.split("token=")[1], password=NEW)
    assert done.url.path == "/reset/done"
    assert (await tab.open("/usage")).url.path == "/login"
