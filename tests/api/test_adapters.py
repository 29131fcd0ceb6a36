"""An adapter is a model of its own to callers: its name, its price; its words are its base's."""

import asyncio
from typing import Any

from billing import pricing
from engine import catalog
from tests.api.conftest import INPUT_PRICE, MODEL, Platform
from tests.api.test_validation import assert_envelope

TUNED = "org/tuned"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 5}


async def host_adapter(platform: Platform) -> None:
    async with platform.services.sessions.begin() as session:
        await catalog.add_model(
            session,
            name=TUNED,
            path="/nowhere/without/a/tokenizer",
            revision="r1",
            architecture="LlamaForCausalLM",
            context_length=1024,
            dtype="float32",
            base=MODEL,
        )
        price = 3 * INPUT_PRICE
        await pricing.set_price(session, TUNED, input=price, cached=price, output=price)


async def listed(platform: Platform, model: str) -> Any:
    async with asyncio.timeout(5):
        while True:
            response = await platform.client.get(f"/v1/models/{model}")
            if response.status_code == 200:
                return response.json()
            await asyncio.sleep(0.05)


async def test_an_adapter_is_listed_with_its_parent_and_speaks_its_bases_tokens(
    platform: Platform,
) -> None:
    assert (await listed(platform, MODEL))["parent"] is None
    await host_adapter(platform)
    assert (await listed(platform, TUNED))["parent"] == MODEL
    quotes = [
        (await platform.post("/v1/quote", BODY | {"model": model})).json()
        for model in (MODEL, TUNED)
    ]
    assert quotes[0]["prompt_tokens"] == quotes[1]["prompt_tokens"] > 0
    assert quotes[0]["max_cost"] != quotes[1]["max_cost"]


async def test_an_adapter_whose_base_is_gone_is_not_found(platform: Platform) -> None:
    await host_adapter(platform)
    await listed(platform, TUNED)
    async with platform.services.sessions.begin() as session:
        tuned = await catalog.find(session, TUNED)
        tuned.base = "org/gone"
    async with asyncio.timeout(5):
        while (response := await platform.post("/v1/quote", BODY | {"model": TUNED})).is_success:
            await asyncio.sleep(0.05)
    assert "does not exist" in assert_envelope(response, 404)["message"]
