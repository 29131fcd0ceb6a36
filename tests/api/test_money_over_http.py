"""Faults of others' gateways with money, tried over HTTP."""

from decimal import Decimal

from tests.api.conftest import MODEL, Platform
from tests.api.test_chat import events


async def test_polling_costs_again(platform: Platform) -> None:
    """litellm 25015: every GET of an answer added its cost once more."""
    platform.say("hello there")
    request_id = (await platform.chat()).json()["id"]
    before = await platform.settled()
    for path in (f"/v1/generations/{request_id}", "/v1/usage", "/v1/credits", "/v1/usage/requests"):
        for _ in range(3):
            response = await platform.client.get(path, headers=platform.customer.headers)
            assert response.status_code == 200
    assert await platform.settled() == before


async def test_spend_of_other_endpoints_misses_the_budget(platform: Platform) -> None:
    """litellm 38176: what `/v1/responses` and `/v1/messages` spent reached no budget."""
    headers = platform.customer.headers
    body = {"api_key": platform.customer.key_id, "limit": "50"}
    made = await platform.client.put("/v1/budgets", json=body, headers=headers)
    assert made.status_code == 200
    platform.say("hello there")
    before = (await platform.settled()).posted
    turn = [{"role": "user", "content": "Hi"}]
    asked = {
        "/v1/chat/completions": {"messages": turn},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": turn, "max_tokens": 20},
    }
    spent = [Decimal(0)]
    for path, body_of_path in asked.items():
        response = await platform.post(path, {"model": MODEL} | body_of_path)
        assert response.status_code == 200, response.text
        await platform.settled()
        found = (await platform.client.get("/v1/budgets", headers=headers)).json()["data"]
        spent.append(Decimal(found[0]["spent"]))
    assert spent == sorted(set(spent)), "each of them has added to it"
    assert spent[-1] == Decimal(before - (await platform.settled()).posted) / 10**9


async def test_error_text_billed_as_output(platform: Platform) -> None:
    """new-api 5289: the text of an error was tokenised and charged."""
    platform.say("one two three", end="error")
    before = await platform.settled()
    assert (await platform.chat()).status_code == 503
    assert (await platform.settled()).posted == before.posted


async def test_no_cost_on_streams(platform: Platform) -> None:
    """litellm 13264: streamed answers cost nothing in the log."""
    platform.say("hello there")
    before = await platform.settled()
    last = events(await platform.chat(stream=True, stream_options={"include_usage": True}))[-1]
    charged = before.posted - (await platform.settled()).posted
    assert Decimal(last["usage"]["cost"]) == Decimal(charged) / 10**9 > 0


async def test_the_prompt_left_out_where_no_limit_is_given(platform: Platform) -> None:
    """one-api 1312: without `max_tokens` the hold left out the prompt."""
    prompt = "word " * 200
    platform.say("hello")
    cost = Decimal((await platform.chat(prompt)).json()["usage"]["cost"])
    left = int(cost * 10**9) // 2
    await platform.settled()
    await platform.set_balance(platform.customer, left)
    refused = await platform.chat(prompt)
    assert refused.status_code == 402
    assert refused.json()["error"]["code"] == "insufficient_credit"
    assert (await platform.settled()).posted == left
