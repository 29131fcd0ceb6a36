"""The page behind the link of the verification mail."""

import io
import re

from accounts import verification
from accounts.mail import Mailer
from billing.outbox_relay import deliver_due
from common.clock import utc_now_us
from tests.web.site import ACCOUNTS, Site, Tab, make_services, make_site

VERIFYING = ACCOUNTS.model_copy(update={"is_email_verification_on": True})


def verifying(site: Site, **changed: object) -> Site:
    services = site.services
    return make_site(
        make_services(services.sessions, services.redis, accounts_settings=VERIFYING, **changed)
    )


async def links_mailed(site: Site) -> list[str]:
    console = io.StringIO()
    mailer = Mailer(VERIFYING, console=console)

    async def mail(sessions: object, payload: dict[str, str]) -> None:
        await verification.deliver(
            site.services.sessions, payload, mailer=mailer, settings=VERIFYING
        )

    await deliver_due(site.services.sessions, {verification.TOPIC: mail})
    return re.findall(r"http://\S+?(/verify\?token=\S+)", console.getvalue())


async def test_the_credit_is_promised_for_the_confirmed_address_and_comes_with_it(
    site: Site,
) -> None:
    strict = verifying(site)
    tab = strict.tab()
    for path in ("/", "/signup"):
        await tab.open(path)
        assert "once you have confirmed your e-mail address" in tab.page
    await tab.sign_up("ada@example.com")
    assert "Open its link to receive your $100.00 of credit" in tab.page
    assert "$0.00" in tab.page
    (link,) = await links_mailed(strict)

    scanner = strict.tab()
    for _ in range(2):
        assert (await scanner.open(link)).status_code == 200, "looking uses nothing up"
    token = link.split("token=")[1]
    await tab.open(link)
    response = await tab.submit("/verify", token=token)
    assert response.url.path == "/verify/done"
    await tab.open("/welcome")
    assert "$100.00" in tab.page
    assert "Open its link" not in tab.page

    again = await scanner.send("/verify", token=token)
    assert again.status_code == 400
    assert "This link does not work" in again.text
    strict.services.password_hasher.close()


async def test_another_mail_can_be_asked_for(site: Site) -> None:
    now = [(utc_now_us() // 300_000_000 - 2) * 300_000_000]
    strict = verifying(site, clock=lambda: now[0])
    tab = strict.tab()
    await tab.sign_up("ada@example.com")
    assert len(await links_mailed(strict)) == 1
    await tab.submit("/verify/resend")
    assert await links_mailed(strict) == [], "one in five minutes"
    now[0] += 300_000_000
    await tab.submit("/verify/resend")
    assert len(await links_mailed(strict)) == 1
    strict.services.password_hasher.close()


async def test_with_verification_off_the_credit_is_promised_at_once(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    assert "$100.00" in tab.page
    assert "/verify/resend" not in tab.page
