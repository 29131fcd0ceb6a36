"""Two customers, every route: neither sees or changes anything of the other's."""

from sqlalchemy import select

from accounts.models import ApiKey, User
from tests.web.site import PASSWORD, Site, Tab, routes_of


async def organization_of(site: Site, email: str) -> str:
    async with site.services.sessions() as session:
        name = await session.scalar(
            select(ApiKey.organization_id)
            .join(User, User.id == ApiKey.created_by)
            .where(User.email == email)
        )
    assert name is not None
    return name


async def key_named(site: Site, name: str) -> ApiKey:
    async with site.services.sessions() as session:
        return (await session.scalars(select(ApiKey).where(ApiKey.name == name))).one()


async def test_no_route_shows_or_changes_what_another_organization_has(
    site: Site, tab: Tab
) -> None:
    plaintext = await tab.sign_up("ada@example.com")
    await tab.open("/keys")
    await tab.submit("/keys", name="adas laptop")
    await tab.open("/models")
    await tab.submit("/models", name="adas/wish", reason="adas reason")
    ada = await organization_of(site, "ada@example.com")
    await site.host("adas/model")
    request_id = await site.use(ada, tokens=(123_457, 7_919, 3_571))
    adas_key = await key_named(site, "adas laptop")
    await tab.open("/usage")
    secrets = {
        "ada@example.com",
        ada,
        plaintext,
        "adas laptop",
        "adas/wish",
        "adas reason",
        adas_key.id,
        adas_key.prefix,
        request_id,
        "3,571",
        tab.client.cookies["ncompass_session"],
    }
    assert {"ada@example.com", request_id, "3,571"} <= {s for s in secrets if s in tab.page}

    bob = site.tab()
    await bob.sign_up("bob@example.com")
    walked = 0
    for route in routes_of(site.app):
        path = route.path.replace("{key_id}", adas_key.id).replace("{name:path}", "adas/model")
        assert "{" not in path, f"teach this test how to fill in {route.path}"
        for method in sorted(route.methods - {"POST"}):
            response = await bob.client.request(method, path)
            _assert_no_leak(response.text, secrets, path)
            walked += 1
    for route in routes_of(site.app):
        if "POST" not in route.methods:
            continue
        path = route.path.replace("{key_id}", adas_key.id)
        if path in ("/logout", "/signup", "/verify", "/reset"):
            continue
        await bob.open("/models")
        response = await bob.send(
            path,
            name="bobs/wish",
            email="bob@example.com",
            password=PASSWORD,
            organization_id=ada,
            key_id=adas_key.id,
        )
        refused = 422 if path.startswith("/billing") else 404 if adas_key.id in path else 303
        assert response.status_code == refused, path
        _assert_no_leak(response.text, secrets, path)
        walked += 1
    assert walked >= 2 * 10
    assert (await key_named(site, "adas laptop")).revoked_at is None
    assert (await key_named(site, "bobs/wish")).organization_id != ada
    await tab.open("/models")
    assert "bobs/wish" not in tab.page


async def test_a_strangers_pages_hold_nothing_of_anybodys(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/models")
    await tab.submit("/models", name="adas/wish")
    stranger = site.tab()
    for route in routes_of(site.app):
        path = route.path.replace("{key_id}", "key_any").replace("{name:path}", "any/model")
        if "GET" in route.methods:
            response = await stranger.client.get(path)
            assert "ada" not in response.text.replace("adaptive", ""), path


def _assert_no_leak(page: str, secrets: set[str], path: str) -> None:
    # An address that somebody types in may come back in a link or a title.
    leaked = {secret for secret in secrets if secret in page}
    assert not leaked, f"{path} shows {leaked}"
