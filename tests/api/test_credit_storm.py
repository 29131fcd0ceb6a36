"""More streams than the credit covers, all at once, on both databases."""

import asyncio

from billing.money import parse_usd
from tests.api.conftest import Platform
from tests.api.credit import assert_reconciled, num_paused, price_of, set_slices

STORY = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen. "


async def test_any_number_of_streams_on_a_nearly_empty_balance_overdraws_nothing(
    platform_on_each_database: Platform,
) -> None:
    platform = platform_on_each_database
    set_slices(platform, 4, pause_s=0.3)
    platform.say(STORY * 3, delay_s=0.001)
    await platform.set_balance(platform.customer, 6 * await price_of(platform, 15) + 1)
    before = await platform.balance()
    answers = await asyncio.gather(*(platform.chat(max_tokens=40) for _ in range(24)))
    served = [answer.json() for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 402]
    assert len(served) + len(refused) == 24
    assert len(served) >= 6
    charged = sum(parse_usd(answer["usage"]["cost"]) for answer in served)
    after = await platform.settled()
    assert before.posted - after.posted == charged
    assert after.posted >= 0
    codes = {
        answer["choices"][0]["finish_details"]["code"]
        for answer in served
        if "finish_details" in answer["choices"][0]
    }
    assert codes == {"insufficient_credit"}
    assert num_paused(platform) == 0
    await assert_reconciled(platform)
