"""A customer whose credit ends in the middle of an answer, and what brings more of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from billing import ledger
from billing.money import cost
from billing.reconcile import reconcile
from common.db import read_only
from common.ids import new_id
from tests.api.conftest import MODEL, Platform


def set_slices(platform: Platform, tokens: int, *, pause_s: float = 0.4) -> None:
    """Hold so many tokens at once, and let a pause last so long."""
    services = platform.services
    billing = services.billing_settings.model_copy(update={"slice_tokens": tokens})
    api = services.settings.model_copy(update={"credit_pause_s": pause_s})
    object.__setattr__(services, "billing_settings", billing)
    object.__setattr__(services, "settings", api)


async def price_of(platform: Platform, output: int, prompt: str = "Hi", cached: int = 0) -> int:
    """What a chat with this prompt and so much output costs."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    quote = (await platform.post("/v1/quote", body)).json()
    price = (await platform.services.catalogue.find(MODEL)).price
    uncached = quote["prompt_tokens"] - cached
    return cost(price, uncached_input=uncached, cached_input=cached, output=output)


async def give(platform: Platform, amount: int) -> None:
    """More credit, as a top-up or an operator would bring it: in a transaction of its own."""
    async with platform.services.sessions.begin() as session:
        await ledger.adjust_credit(
            session,
            platform.customer.organization_id,
            amount,
            reason="test",
            actor="test",
            key=new_id("key"),
        )


async def until(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.005)


async def paused(platform: Platform, count: int = 1) -> None:
    """Wait until so many answers are paused."""
    await until(lambda: num_paused(platform) == count)


def num_paused(platform: Platform) -> float:
    value = platform.services.metrics.registry.get_sample_value("ncompass_generations_paused")
    assert value is not None
    return value


def num_extensions(platform: Platform, outcome: str) -> float:
    registry = platform.services.metrics.registry
    labels = {"outcome": outcome}
    return registry.get_sample_value("ncompass_hold_extensions_total", labels) or 0.0


async def assert_reconciled(platform: Platform) -> None:
    async with read_only(platform.services.sessions) as session:
        assert [check for check in await reconcile(session) if not check.is_ok] == []


async def during_a_pause(
    platform: Platform, asking: Awaitable[Any], act: Callable[[], Awaitable[Any]]
) -> Any:
    """Ask, do something once the answer is paused, and return the answer."""
    task = asyncio.ensure_future(asking)
    await paused(platform)
    await act()
    return await task
