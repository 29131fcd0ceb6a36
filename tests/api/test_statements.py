"""Statements over HTTP, budgets over HTTP, and the bill computed again from its export."""

import csv
import io
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from tests.api.conftest import Platform

SCRIPT = Path(__file__).parents[2] / "docs" / "recompute_bill.py"


async def use(platform: Platform, times: int = 3) -> Decimal:
    platform.say("hello there")
    cost = Decimal(0)
    for number in range(times):
        answer = await platform.chat(f"Say hello {number}")
        cost += Decimal(answer.json()["usage"]["cost"])
    await platform.settled()
    return cost


def recompute(export: str, *files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, files)],
        input=export,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_an_exported_file_is_computed_again_by_its_name(tmp_path: Path) -> None:
    exported = tmp_path / "requests.csv"
    exported.write_text(
        "id,is_billable,uncached_input_tokens,cached_input_tokens,output_tokens,"
        "input_price_per_million,cached_input_price_per_million,output_price_per_million,cost\n"
        "one,1,41,0,8,0.02,0.005,0.06,0.000001300\n"
    )
    assert recompute("", exported).stdout == "0.000001300\n"


async def test_the_bill_can_be_computed_again_from_its_export(platform: Platform) -> None:
    cost = await use(platform)
    response = await platform.client.get(
        "/v1/usage/requests", params={"format": "csv"}, headers=platform.customer.headers
    )
    ran = recompute(response.text)
    assert (ran.returncode, Decimal(ran.stdout)) == (0, cost)
    credit = await platform.client.get("/v1/credits", headers=platform.customer.headers)
    assert Decimal(100) - cost == Decimal(credit.json()["balance"])
    wrong = response.text.replace(",0.0000", ",0.1000")
    assert recompute(wrong).returncode == 1


@pytest.mark.parametrize("group_by", ["hour", "day", "model", "key", "project"])
async def test_every_grouping_is_the_ledger(platform: Platform, group_by: str) -> None:
    cost = await use(platform, 2)
    params = {"group_by": group_by, "timezone": "Asia/Kathmandu"}
    headers = platform.customer.headers
    answer = await platform.client.get("/v1/usage/statement", params=params, headers=headers)
    assert Decimal(answer.json()["total"]) == cost
    text = await platform.client.get(
        "/v1/usage/statement", params=params | {"format": "csv"}, headers=headers
    )
    rows = list(csv.DictReader(io.StringIO(text.text)))
    assert sum(Decimal(row["cost"]) for row in rows) == cost
    assert next(iter(rows[0])) == group_by


async def test_the_ledger_adds_up_to_the_balance(platform: Platform) -> None:
    await use(platform, 2)
    headers = platform.customer.headers
    entries = (await platform.client.get("/v1/credits/ledger", headers=headers)).json()["data"]
    balance = (await platform.client.get("/v1/credits", headers=headers)).json()["balance"]
    assert sum(Decimal(entry["amount"]) for entry in entries) == Decimal(balance)
    assert {entry["kind"] for entry in entries} == {"usage", "signup_grant"}


async def test_pages_of_the_export_are_disjoint_and_complete(platform: Platform) -> None:
    await use(platform, 3)
    seen: list[str] = []
    while True:
        page = await platform.client.get(
            "/v1/usage/requests",
            params={"limit": 2, "after": seen[-1] if seen else ""},
            headers=platform.customer.headers,
        )
        rows = page.json()["data"]
        if not rows:
            break
        seen += [row["id"] for row in rows]
    assert len(seen) == len(set(seen)) == 3


@pytest.mark.parametrize(
    "params",
    [
        {"timezone": "Nowhere"},
        {"group_by": "colour"},
        {"from": "yesterday"},
        {"from": "2026-01-02", "to": "2026-01-01"},
        {"format": "xml"},
    ],
)
async def test_a_bad_parameter_is_named(platform: Platform, params: dict[str, str]) -> None:
    response = await platform.client.get(
        "/v1/usage/statement", params=params, headers=platform.customer.headers
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] in params


async def test_a_budget_over_http_answers_402_by_its_own_code(platform: Platform) -> None:
    headers = platform.customer.headers
    project = await platform.client.post("/v1/projects", json={"name": "CI"}, headers=headers)
    key = await platform.client.post(
        "/v1/keys", json={"name": "ci", "project": project.json()["id"]}, headers=headers
    )
    for body in ({"limit": "1"}, {"limit": "1", "api_key": "a", "project": "b"}):
        assert (
            await platform.client.put("/v1/budgets", json=body, headers=headers)
        ).status_code == 400
    made = await platform.client.put(
        "/v1/budgets", json={"project": project.json()["id"], "limit": "0"}, headers=headers
    )
    assert made.json()["limit"] == "0.000000000"
    platform.say("hello")
    body = {"model": "none", "messages": [{"role": "user", "content": "Hi"}]}
    models = (await platform.client.get("/v1/models")).json()["data"]
    response = await platform.client.post(
        "/v1/chat/completions",
        json=body | {"model": models[0]["id"]},
        headers={"authorization": f"Bearer {key.json()['key']}"},
    )
    assert response.status_code == 402
    assert response.json()["error"]["code"] == "budget_exceeded"
    assert (await platform.chat("Hi")).status_code == 200
    removed = await platform.client.delete(f"/v1/budgets/{made.json()['id']}", headers=headers)
    assert removed.status_code == 204
    assert (await platform.client.get("/v1/budgets", headers=headers)).json()["data"] == []
    assert len((await platform.client.get("/v1/projects", headers=headers)).json()["data"]) == 1
