"""Every number on the pages and in the exports is the ledger's, days of all lengths included."""

import csv
import io
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import select, update

from billing import exports, ledger
from billing.models import CreditLot, UsageRecord
from common.clock import to_datetime, utc_now_us
from common.db import read_only
from common.ids import new_id
from tests.web.site import Site, Tab, make_services, make_site
from tests.web.test_isolation import organization_of

ADA = "ada@example.com"
LONG_DAY = {"from": "2027-10-30", "to": "2027-11-01", "timezone": "Europe/Berlin"}
SHORT_DAY = {"from": "2027-03-27", "to": "2027-03-29", "timezone": "Europe/Berlin"}
"""The middle one of these days has 25 hours, and 23."""
BEGINNINGS = (datetime(2027, 3, 26, 20, 30, tzinfo=UTC), datetime(2027, 10, 29, 20, 30, tzinfo=UTC))
NUM_REQUESTS = 40


class Clock:
    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> int:
        return int(self.now.timestamp()) * 1_000_000


@pytest.fixture
async def ada(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tab]:
    """A customer with a request every two hours around the days of other lengths."""
    monkeypatch.setattr(exports, "PAGE", 7)  # so that every export turns pages
    clock = Clock(BEGINNINGS[0])
    services = make_services(site.services.sessions, site.services.redis, clock=clock)
    past = make_site(services)
    await past.hold_writer.start()
    tab = site.tab()
    await tab.sign_up(ADA)
    organization_id = await organization_of(site, ADA)
    for beginning in BEGINNINGS:
        clock.now = beginning
        for number in range(NUM_REQUESTS // 2):
            await past.use(organization_id, tokens=(101 + number, number % 5, 1 + number % 7))
            clock.now += timedelta(hours=4)
    yield tab
    await past.hold_writer.stop()
    services.password_hasher.close()


async def charged_in(site: Site, days: dict[str, str], num_days: int = 3) -> list[UsageRecord]:
    zone = ZoneInfo(days["timezone"])
    first = datetime.fromisoformat(days["from"]).replace(tzinfo=zone)
    return await charged(site, first, first + timedelta(days=num_days))


async def charged(site: Site, first: datetime, end: datetime) -> list[UsageRecord]:
    async with read_only(site.services.sessions) as session:
        records = list(await session.scalars(select(UsageRecord)))
    return [r for r in records if first <= to_datetime(r.created_at) < end]


def dollars(records: list[UsageRecord]) -> Decimal:
    return sum((Decimal(r.charge_nano_usd) for r in records), Decimal(0)) / 10**9


def rows_of(text: str, wanted: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text))) if wanted == "csv" else json.loads(text)


@pytest.mark.parametrize("wanted", ["csv", "json"])
@pytest.mark.parametrize(("days", "hours"), [(LONG_DAY, 25), (SHORT_DAY, 23)])
async def test_exports_of_local_days_are_what_was_charged_on_them(
    site: Site, ada: Tab, days: dict[str, str], hours: int, wanted: str
) -> None:
    records = await charged_in(site, days)
    assert 17 <= len(records) < NUM_REQUESTS
    for by in ("", "hour", "day", "model", "key", "project"):
        response = await ada.client.get("/usage/export", params=days | {"by": by, "format": wanted})
        assert response.status_code == 200
        assert f".{wanted}" in response.headers["content-disposition"]
        rows = rows_of(response.text, wanted)
        assert sum(Decimal(row["cost"]) for row in rows) == dollars(records), by
        if by == "":
            assert {row["id"] for row in rows} == {record.request_id for record in records}
        if by == "day":
            middle = rows[1]
            start = datetime.fromisoformat(middle["day"]).replace(tzinfo=ZoneInfo(days["timezone"]))
            its = await charged(
                site, start.astimezone(UTC), start.astimezone(UTC) + timedelta(hours=hours)
            )
            assert int(middle["requests"]) == len(its)
            assert Decimal(middle["cost"]) == dollars(its)


@pytest.mark.parametrize("wanted", ["csv", "json"])
async def test_the_exported_ledger_adds_up_to_the_balance(
    site: Site, ada: Tab, wanted: str
) -> None:
    params = {"from": "2026-11-30", "to": "2027-11-30", "timezone": "UTC", "format": wanted}
    rows = rows_of((await ada.client.get("/billing/export", params=params)).text, wanted)
    assert len(rows) == NUM_REQUESTS + 1
    async with read_only(site.services.sessions) as session:
        balance = await ledger.balance(session, await organization_of(site, ADA))
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal(balance.posted) / 10**9
    some = rows_of((await ada.client.get("/billing/export", params=params | LONG_DAY)).text, wanted)
    assert [row for row in rows if row in some] == some
    assert len(some) == len(await charged_in(site, LONG_DAY))


async def test_every_number_of_the_pages_is_the_ledgers(site: Site, ada: Tab) -> None:
    organization_id = await organization_of(site, ADA)
    for _ in range(3):
        await site.use(organization_id, tokens=(101, 2, 1), request_id=new_id("req"))
    async with read_only(site.services.sessions) as session:
        balance = await ledger.balance(session, organization_id)
        records = list(await session.scalars(select(UsageRecord)))
        entries = await ledger.entries(session, organization_id, 50)
    spent = sum(record.charge_nano_usd for record in records)
    assert balance.posted == 100 * 10**9 - spent
    for path in ("/usage", "/billing"):
        await ada.open(path)
        shown = [re.sub(r"<[^>]+>", "", dd) for dd in re.findall(r"<dd>(.*?)</dd>", ada.page, re.S)]
        figures = [int(Decimal(text.strip().strip("$").replace(",", "")) * 10**9) for text in shown]
        assert figures[:4] == [balance.available, balance.promotional, balance.paid, balance.held]
    amounts = re.findall(r'data-label="Credit">([^<]+)<', ada.page)
    in_nano = [
        int(Decimal(text.replace("\N{MINUS SIGN}", "-").replace("$", "")) * 10**9)
        for text in amounts
    ]
    assert in_nano == [amount for _, amount in entries]
    await ada.open("/usage")
    costs = re.findall(r'c-cost">(.*?)</td>', ada.page, re.S)
    listed = [Decimal(re.sub(r"<[^>]+>", "", cost).strip().strip("$")) for cost in costs]
    newest = sorted(records, key=lambda r: (r.created_at, r.request_id), reverse=True)
    expected = [Decimal(record.charge_nano_usd) / 10**9 for record in newest[: len(listed)]]
    assert listed == expected
    today = to_datetime(utc_now_us()).date().isoformat()
    row = re.search(rf"<tr><td>{today}</td>.*?</tr>", ada.page)
    assert row is not None
    numbers = [td.strip("$") for td in re.findall(r'class="n">([^<]+)<', row[0])]
    assert numbers[:4] == ["3", "309", "6", "3"]
    assert Decimal(numbers[4]) == dollars(newest[-3:])


async def test_a_wrong_day_or_zone_is_said_beside_its_field(ada: Tab) -> None:
    for path in ("/usage/export", "/billing/export"):
        for params, field in (
            ({"from": "yesterday"}, "from"),
            ({"timezone": "Mars/Olympus"}, "timezone"),
            ({"from": "2026-02-02", "to": "2026-02-01"}, "from"),
        ):
            response = await ada.client.get(path, params=LONG_DAY | params)
            assert response.status_code == 422
            assert f'id="error-{field}"' in response.text


async def test_an_empty_export_is_an_empty_file(ada: Tab) -> None:
    days = {"from": "2020-01-01", "to": "2020-01-02", "timezone": "UTC"}
    for path in ("/usage/export", "/billing/export"):
        text = (await ada.client.get(path, params=days | {"format": "csv"})).text
        assert len(text.splitlines()) == 1
        assert (await ada.client.get(path, params=days | {"format": "json"})).json() == []


async def test_nobody_exports_what_is_anothers(site: Site, ada: Tab) -> None:
    stranger = site.tab()
    await stranger.sign_up("eve@example.com")
    for path in ("/usage/export", "/billing/export"):
        text = (await stranger.client.get(path, params=LONG_DAY)).text
        assert len(text.splitlines()) == 1


async def test_the_billing_page_says_what_ends(site: Site, tab: Tab) -> None:
    await tab.sign_up(ADA)
    await tab.open("/billing")
    assert "of it ends at" not in tab.page
    async with site.services.sessions.begin() as session:
        await session.execute(update(CreditLot).values(expires_at=1_900_000_000_000_000))
    await tab.open("/billing")
    assert "of it ends at" in tab.page
    assert "2030-03-17 17:46:40" in tab.page
