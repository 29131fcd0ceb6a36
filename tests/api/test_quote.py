"""What a request would cost, told before it runs, held against what it did cost."""

import asyncio
from typing import Any

import pytest

from billing.money import parse_usd
from tests.api.conftest import MODEL, Platform

LONG = "A prefix that is long enough to fill more than one page of the cache. " * 20
MESSAGES = [{"role": "user", "content": LONG}]


async def quote(platform: Platform, body: dict[str, Any]) -> Any:
    response = await platform.post("/v1/quote", {"model": MODEL} | body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "n": 2}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 5}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 5}),
    ],
)
async def test_a_quote_is_exact_and_runs_nothing(
    platform: Platform, path: str, body: dict[str, Any]
) -> None:
    platform.say("one two three four five six seven")
    told = await quote(platform, body)
    assert platform.worker.requests == []
    assert (await platform.balance()).held == 0
    usage = (await platform.post(path, {"model": MODEL} | body)).json()["usage"]
    assert told["prompt_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert told["max_completion_tokens"] == 5 * body.get("n", 1)
    assert told["max_cost"] == usage["cost"], "it ran to its limit, and nothing was cached"
    assert told["is_covered"]


async def test_the_cache_the_credit_and_the_wait_are_told(platform: Platform) -> None:
    platform.say("fine")
    body = {"messages": MESSAGES, "max_tokens": 5}
    async with asyncio.timeout(5):
        while (first := await quote(platform, body))["predicted_ttft_ms"] is None:
            await asyncio.sleep(0.05)  # until the worker's first heartbeat
    assert first["cached_tokens_estimate"] == 0
    assert first["requests_waiting"] == 0
    await platform.post("/v1/chat/completions", {"model": MODEL} | body)
    second = await quote(platform, body)
    assert 0 < second["cached_tokens_estimate"] < second["prompt_tokens"]
    assert parse_usd(second["expected_prompt_cost"]) < parse_usd(first["expected_prompt_cost"])
    assert second["predicted_ttft_ms"] < first["predicted_ttft_ms"]
    await platform.set_balance(platform.customer, 10)
    spent = await quote(platform, body)
    assert not spent["is_covered"]
    assert spent["available"] == "0.000000010"


async def test_another_tenant_s_prompts_are_not_in_the_estimate(platform: Platform) -> None:
    platform.say("fine")
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
    await platform.post("/v1/chat/completions", body)
    eve = await platform.sign_up("eve@example.com")
    told = (await platform.post("/v1/quote", body, customer=eve)).json()
    assert told["cached_tokens_estimate"] == 0


async def test_a_body_that_would_be_refused_is_refused_here(platform: Platform) -> None:
    for body, param in [
        ({"messages": MESSAGES, "n": 0}, "n"),
        ({"prompt": ""}, "prompt"),
        ({}, "messages"),
    ]:
        response = await platform.post("/v1/quote", {"model": MODEL} | body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    headers = platform.customer.headers | {"anthropic-version": "2023-06-01"}
    body = {"model": MODEL, "messages": MESSAGES}
    response = await platform.client.post("/v1/quote", json=body, headers=headers)
    assert response.json()["error"]["param"] == "max_tokens"
