"""A web application on a migrated SQLite and a real Redis."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from billing.gateways import GatewayLease
from common.db import create_engine, create_sessions
from tests.web.site import Site, Tab, make_services, make_site


@pytest.fixture
async def site(sqlite_url: str, clean_redis: str) -> AsyncIterator[Site]:
    """The site, with one model hosted."""
    engine = create_engine(sqlite_url)
    redis = Redis.from_url(clean_redis)
    services = make_services(create_sessions(engine), redis)
    site = make_site(services)
    await GatewayLease(services.sessions, "gw_tests", lease_s=60).renew()
    await site.hold_writer.start()
    await site.host()
    yield site
    for tab in site.tabs:
        await tab.client.aclose()
    await site.hold_writer.stop()
    services.password_hasher.close()
    await redis.aclose()
    await engine.dispose()


@pytest.fixture
def tab(site: Site) -> Tab:
    """A browser that has never been here."""
    return site.tab()
