"""Sign-up, keys, credits, usage and administration by JSON."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from accounts import password_reset
from accounts.mail import Mailer
from accounts.throttle import Throttle
from billing.money import parse_usd
from billing.outbox_relay import deliver_due
from common.db import Sessions
from engine import additions
from tests.api.conftest import MODEL, PASSWORD, Platform, Populated, open_platform
from tests.api.test_validation import assert_envelope


@pytest.fixture
async def each(
    populated: Populated, clean_redis: str, default_model_directory: Path
) -> AsyncIterator[Platform]:
    async with open_platform(populated, clean_redis, default_model_directory) as opened:
        yield opened


async def test_sign_up_gives_a_key_and_a_hundred_dollars_once_per_inbox(each: Platform) -> None:
    body = {"email": "Grace.Hopper+work@example.com", "password": PASSWORD}
    answer = await each.client.post("/v1/signup", json=body)
    assert answer.status_code == 201, answer.text
    account = answer.json()
    assert account["credit"] == "100.000000000"
    headers = {"authorization": f"Bearer {account['api_key']}"}
    credit = (await each.client.get("/v1/credits", headers=headers)).json()
    assert credit == {
        "organization": account["organization"],
        "balance": "100.000000000",
        "held": "0.000000000",
        "available": "100.000000000",
        "promotional": "100.000000000",
        "paid": "0.000000000",
        "ends_next": None,
    }
    each.say("welcome")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    inference = await each.client.post("/v1/chat/completions", json=chat, headers=headers)
    assert inference.status_code == 200
    again = await each.client.post("/v1/signup", json=body)
    assert assert_envelope(again, 400, "email")["code"] == "email_taken"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "email"),
        ({"email": "x@example.com"}, "password"),
        ({"email": 5, "password": PASSWORD}, "email"),
        ({"email": "not an address", "password": PASSWORD}, "email"),
        ({"email": "x@example.com", "password": "short"}, "password"),
        ({"email": "nul\u0000@example.com", "password": PASSWORD}, "email"),
    ],
)
async def test_a_wrong_sign_up_is_400(
    platform: Platform, body: dict[str, object], param: str
) -> None:
    response = await platform.client.post("/v1/signup", json=body)
    assert_envelope(response, 400, param)
    assert "short" not in response.text


async def test_a_password_is_reset_by_mail_and_every_address_gets_the_same_answer(
    platform: Platform,
) -> None:
    known = {"email": platform.customer.email}
    answers = [
        await platform.client.post("/v1/password/forgot", json=body)
        for body in (known, {"email": "nobody@example.com"})
    ]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    console = io.StringIO()
    settings = platform.services.accounts_settings
    mailer = Mailer(settings, console=console)

    async def mail(sessions: Sessions, payload: dict[str, str]) -> None:
        await password_reset.deliver(sessions, payload, mailer=mailer, settings=settings)

    await deliver_due(platform.services.sessions, {password_reset.TOPIC: mail})
    (token,) = re.findall(r"token=(\S+)", console.getvalue())
    weak = {"token": token, "password": "short"}
    response = await platform.client.post("/v1/password/reset", json=weak)
    assert_envelope(response, 400, "password")
    new = {"token": token, "password": "another long password"}
    response = await platform.client.post("/v1/password/reset", json=new)
    assert response.json() == {"is_reset": True}
    again = await platform.client.post("/v1/password/reset", json=new)
    assert assert_envelope(again, 400, "token")["code"] == "invalid_token"
    mine = {"authorization": f"Bearer {platform.customer.key}"}
    credit = await platform.client.get("/v1/credits", headers=mine)
    assert credit.status_code == 200, "keys go on working"


async def test_sign_up_is_the_only_thing_that_is_throttled(platform: Platform) -> None:
    strict = platform.services.accounts_settings.model_copy(update={"signups_per_network": 2})
    throttle = Throttle(platform.services.broker._redis, strict)
    object.__setattr__(platform.services, "throttle", throttle)
    statuses = []
    for number in range(4):
        body = {"email": f"user{number}@example.com", "password": PASSWORD}
        response = await platform.client.post("/v1/signup", json=body)
        statuses.append(response.status_code)
    assert statuses == [201, 201, 429, 429]
    assert_envelope(response, 429)
    assert int(response.headers["retry-after"]) > 0
    platform.say("never throttled")
    answers = await asyncio.gather(*(platform.chat() for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}


async def test_keys_are_shown_once_and_revoked_at_once(platform: Platform) -> None:
    headers = platform.customer.headers
    created = await platform.client.post("/v1/keys", json={"name": "CI"}, headers=headers)
    assert created.status_code == 201
    key = created.json()
    assert key["key"].startswith("sk_ncompass_")
    assert key["scopes"] == ["inference"]
    listed = (await platform.client.get("/v1/keys", headers=headers)).json()["data"]
    assert key["id"] in {entry["id"] for entry in listed}
    assert all("key" not in entry for entry in listed)
    fresh = {"authorization": f"Bearer {key['key']}"}
    assert (await platform.client.get("/v1/credits", headers=fresh)).status_code == 200
    revoked = await platform.client.delete(f"/v1/keys/{key['id']}", headers=headers)
    assert revoked.json()["revoked"] is not None
    platform.say("x")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    # The cache may know the key for a second yet; admission does not.
    refused = await platform.client.post("/v1/chat/completions", json=chat, headers=fresh)
    assert assert_envelope(refused, 401)["code"] == "invalid_api_key"
    missing = await platform.client.delete("/v1/keys/key_none", headers=headers)
    assert_envelope(missing, 404)


async def test_nobody_grants_more_than_they_hold(platform: Platform) -> None:
    headers = platform.customer.headers
    response = await platform.client.post(
        "/v1/keys", json={"scopes": ["operator"]}, headers=headers
    )
    assert_envelope(response, 403)
    for scopes in ([], ["root"], "inference"):
        response = await platform.client.post("/v1/keys", json={"scopes": scopes}, headers=headers)
        assert_envelope(response, 400)


async def test_usage_sums_and_lists_what_was_used(platform: Platform) -> None:
    platform.say("one two")
    answers = [(await platform.chat()).json() for _ in range(3)]
    headers = platform.customer.headers
    content = (await platform.client.get("/v1/usage?days=2", headers=headers)).json()
    (day,) = content["days"]
    assert (day["model"], day["requests"]) == (MODEL, 3)
    total = sum(parse_usd(answer["usage"]["cost"]) for answer in answers)
    assert parse_usd(day["cost"]) == total
    assert {entry["id"] for entry in content["recent"]} == {answer["id"] for answer in answers}
    for query in ("days=0", "days=x", "limit=-1", "days=1e9"):
        response = await platform.client.get(f"/v1/usage?{query}", headers=headers)
        assert_envelope(response, 400, query.split("=")[0])


async def test_a_generation_tells_its_timing(platform: Platform) -> None:
    platform.say("one two three")
    answer = (await platform.chat()).json()
    headers = platform.customer.headers
    content = (await platform.client.get(f"/v1/generations/{answer['id']}", headers=headers)).json()
    assert content["finish_reason"] == "stop"
    assert content["timing"]["queued_ms"] == 1.0
    assert content["timing"]["ttft_ms"] == answer["timing"]["ttft_ms"]
    assert_envelope(await platform.client.get("/v1/generations/none", headers=headers), 404)


async def test_a_model_may_be_asked_for(platform: Platform) -> None:
    response = await platform.post("/v1/model_requests", {"model": "some/model", "reason": "fun"})
    assert response.status_code == 201
    assert response.json()["model"] == "some/model"
    for model in ("", "x" * 300, "line\nbreak", None, 5):
        assert_envelope(await platform.post("/v1/model_requests", {"model": model}), 400, "model")


async def test_an_operator_adjusts_credit_once_per_key(each: Platform) -> None:
    operator = await each.issue(each.customer)
    other = await each.sign_up("other@example.com")
    body = {
        "organization": other.organization_id,
        "amount": "-12.5",
        "reason": "a correction",
        "idempotency_key": "once",
    }
    for _ in range(2):
        response = await each.post("/v1/admin/credits/adjust", body, customer=operator)
        assert response.json()["available"] == "87.500000000", response.text
    for change in (
        {"amount": 12.5}, {"amount": "1e3"}, {"amount": "NaN"}, {"amount": "0.0000000001"},
        {"amount": "0"}, {"reason": " "}, {"amount": "99999999999999"},
    ):  # fmt: skip
        wrong = body | {"idempotency_key": "other"} | change
        response = await each.post("/v1/admin/credits/adjust", wrong, customer=operator)
        assert_envelope(response, 400, next(iter(change)))
    nobody = body | {"organization": "org_none", "idempotency_key": "third"}
    assert_envelope(await each.post("/v1/admin/credits/adjust", nobody, customer=operator), 404)


async def test_an_operator_asks_for_a_model_and_sees_how_far_it_has_come(each: Platform) -> None:
    operator = await each.issue(each.customer)
    prices = {"input_price": "0.10", "cached_price": "0.02", "output_price": "0.40"}
    body = {"source": "owner/name", "licence": "mit"} | prices
    for change, param in (
        ({"cached_price": "0.2"}, "input_price"), ({"input_price": "-1"}, "input_price"),
        ({"input_price": "x"}, None), ({"source": ""}, "source"), ({"name": MODEL}, "source"),
    ):  # fmt: skip
        response = await each.post("/v1/admin/models", body | change, customer=operator)
        error = assert_envelope(response, 400)
        assert param is None or error["param"] == param
    orphan = await each.post("/v1/admin/models", body | {"base": "no/body"}, customer=operator)
    assert "no hosted model 'no/body'" in assert_envelope(orphan, 404)["message"]
    response = await each.post("/v1/admin/models", body, customer=operator)
    assert response.status_code == 202, response.text
    addition = response.json()
    assert (addition["state"], addition["source"]) == ("waiting", "owner/name")
    again = await each.post("/v1/admin/models", body, customer=operator)
    assert "is being added already" in assert_envelope(again, 400)["message"]

    async with each.services.sessions.begin() as session:
        await additions.note(session, addition["id"], "checking", "reading", name="owner/name")
        await additions.note(session, addition["id"], "failed", "it has no licence")
    path, headers = f"/v1/admin/models/{addition['id']}", operator.headers
    found = (await each.client.get(path, headers=headers)).json()
    assert (found["state"], found["failed_step"]) == ("failed", "checking")
    assert (found["model"], found["detail"]) == ("owner/name", "it has no licence")
    listed = (await each.client.get("/v1/admin/models", headers=headers)).json()
    assert [one["id"] for one in listed["data"]] == [addition["id"]]
    assert_envelope(await each.client.get("/v1/admin/models/none", headers=headers), 404)


async def test_an_operator_sees_the_workers(platform: Platform) -> None:
    operator = await platform.issue(platform.customer)
    async with asyncio.timeout(3):
        while True:
            response = await platform.client.get("/v1/admin/workers", headers=operator.headers)
            if response.json()["data"]:
                break
            await asyncio.sleep(0.05)
    (worker,) = response.json()["data"]
    assert (worker["worker"], worker["model"], worker["state"]) == ("fake-worker", MODEL, "ready")
    assert worker["utilisation"]["compute"] == 0.75
    assert worker["cost_model"]["per_token_s"] == 1e-4
